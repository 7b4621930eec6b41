"""The kernels of `fa3_decode`, one after the other: scores, weights, the chain, and the end of it.

Shapes      as `fa3_decode` names them; a program of the first three takes one request and one key
            head: GROUP query heads, BLOCK_G with padding, which repeats the last of them. Of a
            request with more than ``longest`` keys, which the caller has no memory for, the first
Order       `_fours`, `_sums` and `_values` hold FA3's; everything else has none
Bits depend on   what they depend on in `fa3_decode`
"""

from __future__ import annotations

import triton
import triton.language as tl

from sgl_det.kernels.merge_chunks import take


@triton.jit
def _approximate(x, RECIPROCAL: tl.constexpr):
    """1 / x or log2(x), fp32, as the GPU's approximate instruction gives it."""
    if RECIPROCAL:
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def fa3_scores_kernel(
    q_ptr, k_ptr, table_ptr, lengths_ptr, scores_ptr, tops_ptr,
    stride_qt, stride_qh, stride_ks, stride_kg, stride_table, stride_scores, longest,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    g, share, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.minimum(tl.load(lengths_ptr + b), longest)
    rm, rd, rs = tl.arange(0, BLOCK_M), tl.arange(0, D), tl.arange(0, N)
    h = g * GROUP + tl.minimum(rm, GROUP - 1)
    q = tl.load(q_ptr + b.to(tl.int64) * stride_qt + h[:, None] * stride_qh + rd[None, :])
    table = table_ptr + b.to(tl.int64) * stride_table
    row = (b * H + h).to(tl.int64)
    for tile in range(share, tl.cdiv(length, N), tl.num_programs(1)):
        s = tile * N + rs
        inside = s < length
        slot = tl.load(table + s, mask=inside, other=0).to(tl.int64)
        k_at = k_ptr + g * stride_kg + slot[None, :] * stride_ks + rd[:, None]
        x = tl.dot(q, tl.load(k_at, mask=inside[None, :], other=0.0))
        x = tl.where(inside[None, :], x, float("-inf"))
        kept = rm < GROUP
        tl.store(scores_ptr + row[:, None] * stride_scores + s[None, :], x, mask=kept[:, None])
        tl.store(tops_ptr + row * (stride_scores // N) + tile, tl.max(x, axis=1), mask=kept)


@triton.jit
def fa3_weights_kernel(
    lengths_ptr, scores_ptr, tops_ptr, weights_ptr, rescales_ptr, stride_scores, longest,
    log2, H: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, N: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Turn scores into p, in place and rounded, and note what each tile rescales by."""
    g, share, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.cdiv(tl.minimum(tl.load(lengths_ptr + b), longest), N)
    rg, rs, rt = tl.arange(0, BLOCK_G), tl.arange(0, N), tl.arange(0, TILES)
    h, kept = g * GROUP + tl.minimum(rg, GROUP - 1), rg < GROUP
    row = (b * H + h).to(tl.int64)
    per_row = stride_scores // N
    for tile in range(share, count, tl.num_programs(1)):
        # The maxima of its chunk from this tile on: FA3 has taken all of them but this one's.
        last = tl.minimum(count, (tile // TILES + 1) * TILES)
        tops = tops_ptr + row[:, None] * per_row + tile + rt[None, :]
        tops = tl.load(tops, mask=(tile + rt < last)[None, :], other=float("-inf"))
        higher = tl.max(tops, axis=1)
        before = tl.max(tl.where(rt[None, :] > 0, tops, float("-inf")), axis=1)
        at = row[:, None] * stride_scores + tile * N + rs[None, :]
        p = tl.exp2(tl.fma(tl.load(scores_ptr + at), log2, -(higher * log2)[:, None]))
        tl.store(scores_ptr + at, p, mask=kept[:, None])
        tl.store(weights_ptr + at, p.to(weights_ptr.dtype.element_ty), mask=kept[:, None])
        rescale = tl.exp2((before - higher) * log2)
        tl.store(rescales_ptr + row * per_row + tile, rescale, mask=kept)


@triton.jit
def _fours(p, tile, N: tl.constexpr):
    """The weights of a tile, as its sums take them: N / 4 times the next key of each [G, 4]."""
    some = ()
    for j in tl.static_range(N // 4):
        at = tile * N + j // 2 * 8 + j % 2 + 2 * tl.arange(0, 4)
        some += (tl.load(p[:, None] + at[None, :]),)
    return some


@triton.jit
def _sums(p, rescales, first, tiles, BLOCK_G: tl.constexpr, N: tl.constexpr):
    """The sums [G] of the ``tiles`` tiles from ``first``, taken from the last on."""
    sums = tl.zeros((BLOCK_G, 4), tl.float32)
    ahead, by = _fours(p, first + tiles - 1, N), tl.load(rescales + first + tiles - 1)
    for i in range(0, tiles):
        some, rescale = ahead, by
        # What comes next is loaded before it is needed; at the end, once more the first tile.
        tile = first + tl.maximum(tiles - 2 - i, 0)
        ahead, by = _fours(p, tile, N), tl.load(rescales + tile)
        sums = tl.fma(sums, rescale[:, None], some[0])
        for j in tl.static_range(1, N // 4):
            sums += some[j]
    return tl.sum(tl.sum(tl.reshape(sums, (BLOCK_G, 2, 2)), axis=1), axis=1)


@triton.jit
def _values(
    weights, rescales, v_ptr, table, stride_vs, first, tiles, end, DV: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """The sum of p v over the same tiles, before it is normalised: [16, DV]."""
    rs, rv, last = tl.arange(0, N), tl.arange(0, DV), first + tiles - 1
    acc = tl.zeros((16, DV), tl.float32)
    ahead = tl.load(rescales + last)
    for i in range(0, tiles):
        rescale = ahead
        ahead = tl.load(rescales + tl.maximum(last - i - 1, first))
        s = (last - i) * N + rs
        inside = s < end
        slot = tl.load(table + s, mask=inside, other=0).to(tl.int64)
        v_at = v_ptr + slot[:, None] * stride_vs + rv[None, :]
        v = tl.load(v_at, mask=inside[:, None], other=0.0)
        p = tl.load(weights[:, None] + s[None, :])  # [16, N]
        acc = tl.dot(p, v, acc * rescale[:, None])
    return acc


@triton.jit
def fa3_chain_kernel(
    v_ptr, table_ptr, lengths_ptr, scores_ptr, tops_ptr, weights_ptr, rescales_ptr, parts_ptr,
    ends_ptr, stride_vs, stride_vg, stride_table, stride_scores, longest,
    chunks, H: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    PIECES: tl.constexpr = D // DV
    TILES: tl.constexpr = CHUNK // N
    g, part, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    chunk, piece = part // (PIECES + 1), part % (PIECES + 1)
    length = tl.minimum(tl.load(lengths_ptr + b), longest)
    begin = chunk * CHUNK
    if begin >= length:
        return
    end = tl.minimum(length, begin + CHUNK)
    first, tiles = begin // N, tl.cdiv(end - begin, N)
    out = (b * chunks + chunk).to(tl.int64) * H
    per_row = stride_scores // N
    if piece == PIECES:
        rg, rt = tl.arange(0, BLOCK_G), tl.arange(0, TILES)
        h = g * GROUP + tl.minimum(rg, GROUP - 1)
        row = (b * H + h).to(tl.int64)
        total = _sums(
            scores_ptr + row * stride_scores, rescales_ptr + row * per_row, first, tiles, BLOCK_G, N
        )
        tops = tops_ptr + row[:, None] * per_row + first + rt[None, :]
        tops = tl.load(tops, mask=(rt < tiles)[None, :], other=float("-inf"))
        at, size = ends_ptr + out + h, tl.num_programs(2).to(tl.int64) * chunks * H
        tl.store(at, tl.max(tops, axis=1), mask=rg < GROUP)
        tl.store(at + size, total, mask=rg < GROUP)
    else:
        # A matrix has 16 rows at least; those beyond the group repeat its last head.
        rm, rv = tl.arange(0, 16), piece * DV + tl.arange(0, DV)
        head = g * GROUP + tl.minimum(rm, GROUP - 1)
        rows = (b * H + head).to(tl.int64)
        acc = _values(
            weights_ptr + rows * stride_scores, rescales_ptr + rows * per_row,
            v_ptr + g * stride_vg + piece * DV, table_ptr + b.to(tl.int64) * stride_table,
            stride_vs, first, tiles, end, DV, N,
        )  # fmt: skip
        to = parts_ptr + (out + head)[:, None] * D + rv[None, :]
        tl.store(to, acc, mask=(rm < GROUP)[:, None])


@triton.jit
def fa3_finish_kernel(
    parts_ptr, ends_ptr, lengths_ptr, sinks_ptr, o_ptr, stride_ot, stride_oh, log, longest,
    chunks, H: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, UNROLL: tl.constexpr,
    SINKS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    b, h, rd = tl.program_id(1), tl.program_id(0) + tl.arange(0, 1), tl.arange(0, D)
    count = tl.cdiv(tl.minimum(tl.load(lengths_ptr + b), longest), CHUNK)
    size = tl.num_programs(1).to(tl.int64) * chunks * H
    top = tl.full((1,), float("-inf"), tl.float32)
    total, acc = tl.zeros((1,), tl.float32), tl.zeros((1, D), tl.float32)
    for begin in range(0, count, UNROLL):
        for i in tl.static_range(UNROLL):
            there = begin + i < count
            row = (b * chunks + begin + i).to(tl.int64) * H + h
            high = tl.load(ends_ptr + row, mask=there, other=float("-inf"))
            sums = tl.load(ends_ptr + size + row, mask=there, other=1.0)
            at = parts_ptr + row[:, None] * D + rd[None, :]
            values = tl.load(at, mask=there, other=0.0)
            if EXACT:
                once, above = tl.div_rn(1.0, sums), tl.log2(sums)
            else:
                once, above = _approximate(sums, True), _approximate(sums, False)
            # As FA3 stores it, and as `merge_chunks` takes it.
            o = (values * once[:, None]).to(o_ptr.dtype.element_ty).to(tl.float32)
            lse = tl.fma(high, log, above * 0.6931471805599453)
            top, total, acc = take(top, total, acc, lse, o)
    if SINKS:
        sink = tl.load(sinks_ptr + h).to(tl.float32)
        top, total, acc = take(top, total, acc, sink, tl.zeros_like(acc))
    empty = top == float("-inf")
    o = tl.where(empty[:, None], 0.0, tl.div_rn(acc, tl.where(empty, 1.0, total)[:, None]))
    to = o_ptr + b.to(tl.int64) * stride_ot + h[:, None] * stride_oh + rd[None, :]
    tl.store(to, o.to(o_ptr.dtype.element_ty))
