"""The first and the last kernel of `fa3_decode`: scores, and the end of the chunks.

Shapes      as `fa3_decode` names them; a program of the first takes one request and one key head:
            GROUP query heads, and padding, which repeats the last of them. Of a request with more
            than ``longest`` keys, which the caller has no memory for, the first
Order       the end has that of `merge_chunks`; scores have FA3's, over D
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
    BLOCK_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
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
def fa3_finish_kernel(
    parts_ptr, ends_ptr, lengths_ptr, sinks_ptr, o_ptr, stride_ot, stride_oh, log, longest,
    chunks, H: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, UNROLL: tl.constexpr,
    SINKS: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b, h, rd = tl.program_id(1), tl.program_id(0) + tl.arange(0, 1), tl.arange(0, D)
    count = tl.cdiv(tl.minimum(tl.load(lengths_ptr + b), longest), CHUNK)
    if PDL:
        tl.extra.cuda.gdc_wait()
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
