"""Attention of one new token a request over its keys in the pool

Order and bits: `attention_order`; equal to `attention` for a request of one new token. Two ways,
equal in every bit: one program loops over the splits of a (request, key head), or several share
them, leave what each split gives, and a second kernel merges it in ascending order.

Shapes      q, o [B, H, D]   k_pool, v_pool [slots, G, D]   table [requests, longest] of slots
            keys of request b in table[rows[b], 0 .. lengths[b]]   lse [B, H] or None
            work: parts [B, H, splits, D], tops and totals [B, H, splits]
Dtypes      q, pools, o: bf16 | fp16; table int32; rows, lengths int32 or int64; lse, work fp32
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sgl_det.kernels import attention_order as order
from sgl_det.kernels.attention import Options, check
from sgl_det.kernels.attention_order import finish, merged, one_split


@dataclass(frozen=True, slots=True)
class Work:
    """Memory in which programs that share a request leave their splits."""

    parts: torch.Tensor
    tops: torch.Tensor
    totals: torch.Tensor

    @classmethod
    def allocate(cls, batch: int, heads: int, longest: int, d: int, device) -> Work:
        """For ``batch`` requests of at most ``longest`` keys."""
        splits = triton.cdiv(longest, order.SPLIT)
        shape = (batch, heads, splits)
        parts = torch.empty((*shape, d), dtype=torch.float32, device=device)
        return cls(parts, *torch.empty((2, *shape), dtype=torch.float32, device=device))


@triton.jit(do_not_specialize=["window"])
def _decode_attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, table_ptr, rows_ptr, lengths_ptr, sinks_ptr,
    parts_ptr, tops_ptr, totals_ptr,
    stride_qt, stride_qh, stride_ks, stride_kg, stride_vs, stride_vg, stride_ot, stride_oh,
    stride_table, stride_parts, scale, cap, window,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, SPLIT: tl.constexpr, SHARED: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    g, b, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_ptr + b).to(tl.int32)
    begin = tl.maximum(length - 1 - window, 0) // BLOCK_S * BLOCK_S if WINDOW else 0
    first, last = begin // SPLIT, tl.cdiv(length, SPLIT)
    if first + share >= last:
        return
    rm, rd = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    valid, h = rm < GROUP, g * GROUP + tl.minimum(rm, GROUP - 1)
    q_at = q_ptr + b.to(tl.int64) * stride_qt + h[:, None] * stride_qh + rd[None, :]
    q = tl.load(q_at, mask=(rd < D)[None, :], other=0.0)  # [BLOCK_M, BLOCK_D]
    position = tl.zeros((BLOCK_M,), tl.int32) + length - 1
    table = table_ptr + tl.load(rows_ptr + b).to(tl.int64) * stride_table
    k_at, v_at = k_ptr + g * stride_kg, v_ptr + g * stride_vg
    top = tl.full((BLOCK_M, 1), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M, 16), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for split in range(first + share, last, SHARED):
        lo = tl.maximum(split * SPLIT, begin)
        hi = tl.minimum(split * SPLIT + SPLIT, length)
        late = tl.maximum(hi // BLOCK_S * BLOCK_S, lo)
        # Every key is seen, but for the first tile of a window and the end of the last tile.
        whole = tl.minimum(lo + BLOCK_S, late) if WINDOW else lo
        top_s, total_s, acc_s = one_split(
            q, k_at, v_at, table, stride_ks, stride_vs, lo, whole, late, hi, position,
            scale, cap, window, BLOCK_M, D, BLOCK_D, BLOCK_S, WINDOW, CAP,
        )  # fmt: skip
        if SHARED == 1 or last - first == 1:
            top, total, acc = merged(top, total, acc, top_s, total_s, acc_s)
        if SHARED > 1:
            kept = valid & (last - first > 1)
            at = b.to(tl.int64) * stride_parts + h * (stride_parts // H) + split
            part = parts_ptr + at[:, None] * D + rd[None, :]
            tl.store(part, acc_s, mask=kept[:, None] & (rd < D)[None, :])
            tl.store(tops_ptr + at, tl.max(top_s, axis=1), mask=kept)
            tl.store(totals_ptr + at, tl.max(total_s, axis=1), mask=kept)
    if SHARED == 1 or last - first == 1:
        finish(
            top, tl.max(total, axis=1)[:, None], acc, b + rm * 0, h, valid, o_ptr, lse_ptr,
            sinks_ptr, stride_ot, stride_oh, H, D, BLOCK_D, SINKS, LSE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["window"])
def _merge_splits_kernel(
    o_ptr, lse_ptr, lengths_ptr, sinks_ptr, parts_ptr, tops_ptr, totals_ptr,
    stride_ot, stride_oh, stride_parts, window,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    SPLIT: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    head, b = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths_ptr + b).to(tl.int32)
    begin = tl.maximum(length - 1 - window, 0) // BLOCK_S * BLOCK_S if WINDOW else 0
    first, last = begin // SPLIT, tl.cdiv(length, SPLIT)
    if last - first <= 1:
        return
    rd, h = tl.arange(0, BLOCK_D), head + tl.arange(0, 1)
    top = tl.full((1, 1), float("-inf"), tl.float32)
    total = tl.zeros((1, 1), tl.float32)
    acc = tl.zeros((1, BLOCK_D), tl.float32)
    at = b.to(tl.int64) * stride_parts + h * (stride_parts // H)  # [1]
    for split in range(first, last):
        part = parts_ptr + (at + split)[:, None] * D + rd[None, :]
        acc_s = tl.load(part, mask=(rd < D)[None, :], other=0.0)
        top_s = tl.load(tops_ptr + at + split)[:, None]
        total_s = tl.load(totals_ptr + at + split)[:, None]
        top, total, acc = merged(top, total, acc, top_s, total_s, acc_s)
    finish(
        top, total, acc, b + h * 0, h, h < H, o_ptr, lse_ptr, sinks_ptr, stride_ot, stride_oh,
        H, D, BLOCK_D, SINKS, LSE,
    )  # fmt: skip


def decode_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    options: Options,
    *,
    work: Work | None = None,
    shared: int = 1,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """The attention of the header, by ``shared`` programs for each request and key head.

    More than one needs ``work``. Raises ValueError on what the kernel does not hold.
    """
    heads, d = check(q, k_pool, v_pool)
    if shared > 1 and (work is None or len(work.parts) < len(q)):
        raise ValueError(f"{shared} programs a request need work memory for {len(q)} requests")
    o = torch.empty_like(q) if out is None else out
    if not len(q):
        return o
    group, groups = heads // k_pool.shape[1], k_pool.shape[1]
    parts, tops, totals = (work.parts, work.tops, work.totals) if shared > 1 else (None,) * 3
    stride_parts = parts.stride(0) // d if shared > 1 else 0
    same = {
        "H": heads,
        "D": d,
        "BLOCK_D": triton.next_power_of_2(d),
        "BLOCK_S": order.BLOCK_S,
        "SPLIT": order.SPLIT,
        "WINDOW": options.window >= 0,
        "SINKS": options.sinks is not None,
        "LSE": lse is not None,
        "num_warps": 4,
        "enable_fp_fusion": False,
    }
    pools = (q, k_pool, v_pool, o)
    _decode_attention_kernel[(groups, len(q), shared)](
        *pools, lse, table, rows, lengths, options.sinks, parts, tops, totals,
        *(x.stride(i) for x in pools for i in (0, 1)), table.stride(0), stride_parts,
        options.scale, options.cap or 1.0, options.window, GROUP=group,
        BLOCK_M=max(16, triton.next_power_of_2(group)), SHARED=shared, CAP=options.cap > 0,
        num_stages=3, **same,
    )  # fmt: skip
    if shared > 1:
        _merge_splits_kernel[(heads, len(q))](
            o, lse, lengths, options.sinks, parts, tops, totals,
            *(o.stride(i) for i in (0, 1)), stride_parts, options.window, **same,
        )  # fmt: skip
    return o
