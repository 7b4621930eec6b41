"""The kernels of `fa3_decode`, one after the other: scores, weights, the chain, and the end of it.

Shapes      as `fa3_decode` names them; a program of the first three takes one request and one key
            head: GROUP query heads, BLOCK_G with padding, which repeats the last of them
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
    stride_qt, stride_qh, stride_ks, stride_kg, stride_table, stride_scores,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    g, share, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_ptr + b)
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
    lengths_ptr, scores_ptr, tops_ptr, ordered_ptr, weights_ptr, rescales_ptr, stride_scores, log2,
    H: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, N: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Turn scores into p, as `_sums` takes it and rounded, and note what each tile rescales by."""
    g, share, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.cdiv(tl.load(lengths_ptr + b), N)
    rg, rs, rt = tl.arange(0, BLOCK_G), tl.arange(0, N), tl.arange(0, TILES)
    h, kept = g * GROUP + tl.minimum(rg, GROUP - 1), rg < GROUP
    row = (b * H + h).to(tl.int64)
    per_row = stride_scores // N
    # Sum i takes the keys 2i and 2i + 1 of each eight; four of its keys lie side by side.
    step = rs // 8 * 2 + rs % 2
    place = ((step // 4 * 4 + rs % 8 // 2) * H + h[:, None]) * 4 + step % 4
    for tile in range(share, count, tl.num_programs(1)):
        # The maxima of its chunk from this tile on: FA3 has taken all of them but this one's.
        last = tl.minimum(count, (tile // TILES + 1) * TILES)
        tops = tops_ptr + row[:, None] * per_row + tile + rt[None, :]
        tops = tl.load(tops, mask=(tile + rt < last)[None, :], other=float("-inf"))
        higher = tl.max(tops, axis=1)
        before = tl.max(tl.where(rt[None, :] > 0, tops, float("-inf")), axis=1)
        at = row[:, None] * stride_scores + tile * N + rs[None, :]
        p = tl.exp2(tl.fma(tl.load(scores_ptr + at), log2, -(higher * log2)[:, None]))
        mine = (b * per_row + tile).to(tl.int64) * H
        tl.store(ordered_ptr + mine * N + place, p, mask=kept[:, None])
        tl.store(weights_ptr + at, p.to(weights_ptr.dtype.element_ty), mask=kept[:, None])
        tl.store(rescales_ptr + mine + h, tl.exp2((before - higher) * log2), mask=kept)


@triton.jit
def _tile_of(ordered, rescales, tile, tiles, valid, H: tl.constexpr, N: tl.constexpr):
    """What the sums take of a tile: N / 16 times [HEADS, 4, 4] weights, and its rescale [HEADS].

    A tile that is not there has the weight 0: before the first one, that changes no bit.
    """
    there = valid & (tile < tiles)
    some = ()
    for i in tl.static_range(N // 16):
        at = ordered + (tile * (N // 16) + i) * (H * 16)
        some += (tl.load(at, mask=there[:, None, None], other=0.0),)
    return some, tl.load(rescales + tile * H, mask=there, other=0.0)


@triton.jit
def _one_after_the_other(sums, x):
    """sums [G, 4] and, in turn, the last axis of x [G, 4, 4]."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return sums + first + second + third + fourth


@triton.jit
def _with_tile(sums, some, rescale, N: tl.constexpr):
    """sums [G, 4] with a tile; its first weight is added by one rounding with the rescale."""
    x = some[0]
    even, odd = tl.split(tl.reshape(x, (x.shape[0], 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    sums = tl.fma(sums, rescale[:, None], first) + second + third + fourth
    for i in tl.static_range(1, N // 16):
        sums = _one_after_the_other(sums, some[i])
    return sums


@triton.jit
def _sums(
    ordered, rescales, tiles, valid, H: tl.constexpr, HEADS: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """The sums [HEADS] of ``tiles`` tiles, taken from the last on, two a turn."""
    sums = tl.zeros((HEADS, 4), tl.float32)
    turns = tl.cdiv(tiles, 2)
    one, by_one = _tile_of(ordered, rescales, 2 * turns - 1, tiles, valid, H, N)
    two, by_two = _tile_of(ordered, rescales, 2 * turns - 2, tiles, valid, H, N)
    for turn in range(0, turns):
        a, by_a, b, by_b = one, by_one, two, by_two
        # What comes next is loaded before it is needed; at the end, once more the first tiles.
        last = 2 * tl.maximum(turns - 1 - turn, 1) - 1
        one, by_one = _tile_of(ordered, rescales, last, tiles, valid, H, N)
        two, by_two = _tile_of(ordered, rescales, last - 1, tiles, valid, H, N)
        sums = _with_tile(_with_tile(sums, a, by_a, N), b, by_b, N)
    return tl.sum(tl.sum(tl.reshape(sums, (HEADS, 2, 2)), axis=1), axis=1)


@triton.jit
def _values(
    weights, rescales, v_ptr, table, stride_vs, tiles, keys, H: tl.constexpr, DV: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """The sum of p v over the same tiles, before it is normalised: [16, DV]."""
    rs, rv = tl.arange(0, N), tl.arange(0, DV)
    acc = tl.zeros((16, DV), tl.float32)
    turns = tl.cdiv(tiles, 2)
    one = tl.load(rescales + (2 * turns - 1) * H, mask=2 * turns <= tiles, other=0.0)
    two = tl.load(rescales + (2 * turns - 2) * H)
    for turn in range(0, turns):
        last = 2 * (turns - turn) - 1
        a, b = one, two
        one = tl.load(rescales + tl.maximum(last - 2, 0) * H)
        two = tl.load(rescales + tl.maximum(last - 3, 0) * H)
        for i in tl.static_range(2):
            s = (last - i) * N + rs
            inside = s < keys
            slot = tl.load(table + s, mask=inside, other=0).to(tl.int64)
            v_at = v_ptr + slot[:, None] * stride_vs + rv[None, :]
            v = tl.load(v_at, mask=inside[:, None], other=0.0)
            # A tile that is not there has the weight 0, as in `_tile_of`.
            p = tl.load(weights[:, None] + s[None, :], mask=(s < tiles * N)[None, :], other=0.0)
            acc = tl.dot(p, v, acc * (a if i == 0 else b)[:, None])
    return acc


@triton.jit
def fa3_chain_kernel(
    v_ptr, table_ptr, lengths_ptr, tops_ptr, ordered_ptr, weights_ptr, rescales_ptr, parts_ptr,
    ends_ptr, stride_vs, stride_vg, stride_table, stride_scores, chunks,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, N: tl.constexpr,
    CHUNK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    PIECES: tl.constexpr = D // DV
    TILES: tl.constexpr = CHUNK // N
    g, part, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    chunk, piece = part // (PIECES + 1), part % (PIECES + 1)
    length = tl.load(lengths_ptr + b)
    begin = chunk * CHUNK
    if begin >= length:
        return
    keys = tl.minimum(length - begin, CHUNK)
    tiles = tl.cdiv(keys, N)
    out = (b * chunks + chunk).to(tl.int64) * H
    per_row, first = stride_scores // N, begin // N
    tile = (b * per_row + first).to(tl.int64) * H
    if piece == PIECES:
        # HEADS heads, whatever their groups, so that a thread has a sum of its own.
        if g * HEADS >= H:
            return
        h, rt, four = g * HEADS + tl.arange(0, HEADS), tl.arange(0, TILES), tl.arange(0, 4)
        row = (b * H + h).to(tl.int64)
        place = (four[None, :, None] * H + h[:, None, None]) * 4 + four[None, None, :]
        ordered = ordered_ptr + tile * N + place
        total = _sums(ordered, rescales_ptr + tile + h, tiles, h < H, H, HEADS, N)
        tops = tops_ptr + row[:, None] * per_row + first + rt[None, :]
        seen = (h < H)[:, None] & (rt < tiles)[None, :]
        tops = tl.load(tops, mask=seen, other=float("-inf"))
        at, size = ends_ptr + out + h, tl.num_programs(2).to(tl.int64) * chunks * H
        tl.store(at, tl.max(tops, axis=1), mask=h < H)
        tl.store(at + size, total, mask=h < H)
    else:
        # A matrix has 16 rows at least; those beyond the group repeat its last head.
        rm, rv = tl.arange(0, 16), piece * DV + tl.arange(0, DV)
        head = g * GROUP + tl.minimum(rm, GROUP - 1)
        rows = (b * H + head).to(tl.int64)
        acc = _values(
            weights_ptr + rows * stride_scores + begin, rescales_ptr + tile + head,
            v_ptr + g * stride_vg + piece * DV, table_ptr + b.to(tl.int64) * stride_table + begin,
            stride_vs, tiles, keys, H, DV, N,
        )  # fmt: skip
        to = parts_ptr + (out + head)[:, None] * D + rv[None, :]
        tl.store(to, acc, mask=(rm < GROUP)[:, None])


@triton.jit
def fa3_finish_kernel(
    parts_ptr, ends_ptr, lengths_ptr, sinks_ptr, o_ptr, stride_ot, stride_oh, log, chunks,
    H: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, UNROLL: tl.constexpr,
    SINKS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    b, h, rd = tl.program_id(1), tl.program_id(0) + tl.arange(0, 1), tl.arange(0, D)
    count = tl.cdiv(tl.load(lengths_ptr + b), CHUNK)
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
