"""Attention of one new token a request over its keys in the pool

Order and bits: `attention_order`; equal to `attention` for a request of one new token. Two ways,
equal in every bit: one program loops over the splits of a (request, key head), or several share
them, leave what each split gives, and a second kernel merges it in ascending order.

Shapes      q, o [B, H, D]   k_pool, v_pool [slots, G, D]   table [requests, longest] of slots
            keys of request b in table[rows[b], 0 .. lengths[b]]   lse [B, H] or None
            or table [N]: all keys of request b, windows or not, end before rows[b];
            without lengths they begin where those of the request before it end, rows[-1] being 0
            work: parts [B, H, splits, D], tops and totals [B, H, splits]
Dtypes      q, pools, o: bf16 | fp16; table int32; rows, lengths int32 or int64; lse, work fp32
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sgl_det.kernels import attention_order as order
from sgl_det.kernels.attention import Options, check, shared_kib
from sgl_det.kernels.attention_order import empty, finish, log2_of, merged, one_tile

_AT_ONCE = 16  # splits that a program of the merge loads together


@dataclass(frozen=True, slots=True)
class Work:
    """Memory in which programs that share a request leave their splits."""

    parts: torch.Tensor
    tops: torch.Tensor
    totals: torch.Tensor

    @staticmethod
    def bytes_of(batch: int, heads: int, longest: int, d: int, split: int | None = None) -> int:
        """What `allocate` takes."""
        return batch * heads * triton.cdiv(longest, split or order.SPLIT) * (d + 2) * 4

    def holds(self, batch: int, heads: int, d: int) -> bool:
        """Whether so many requests of these heads fit; of how many keys, `allocate` was told."""
        most, of, _, size = self.parts.shape
        return batch <= most and (heads, d) == (of, size)

    @classmethod
    def allocate(
        cls, batch: int, heads: int, longest: int, d: int, device, split: int | None = None
    ) -> Work:
        """For ``batch`` requests of at most ``longest`` keys; ``split``: by default the own one."""
        splits = triton.cdiv(longest, split or order.SPLIT)
        shape = (batch, heads, splits)
        parts = torch.empty((*shape, d), dtype=torch.float32, device=device)
        return cls(parts, *torch.empty((2, *shape), dtype=torch.float32, device=device))


@dataclass(frozen=True, slots=True)
class Launch:
    """Warps of a program, and tiles in flight. Any choice, the same bits."""

    warps: int
    stages: int


def programs_for(tile: int, device: torch.device) -> int:
    """Programs that fill a GPU with tiles of ``tile`` keys."""
    return multiprocessors(device) * (1 if tile > 64 else 2)


def launch_for(programs: int, d: int, tile: int, device: torch.device) -> Launch:
    """More tiles in flight where a multiprocessor has no further program to hide behind."""
    if d > 128 or shared_kib(device) < 200:
        return Launch(4, 3)
    few = programs <= programs_for(tile, device)
    if tile > 64:
        return Launch(4, 5 if few else 3)
    return Launch(2, 5 if few else 4)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; an interpreter has as many as an H200."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def length_of(rows_ptr, lengths_ptr, b, ENDS: tl.constexpr):
    """Keys of request b; ENDS: rows_ptr tells where the keys end, also of the request before b."""
    if ENDS:
        length = tl.load(rows_ptr + b) - tl.load(rows_ptr + b - 1)
    else:
        length = tl.load(lengths_ptr + b)
    return length.to(tl.int32)


@triton.jit(do_not_specialize=["window", "shared"])
def _decode_attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, table_ptr, moved_ptr, rows_ptr, lengths_ptr, sinks_ptr,
    parts_ptr, tops_ptr, totals_ptr,
    stride_qt, stride_qh, stride_ks, stride_kg, stride_vs, stride_vg, stride_ot, stride_oh,
    stride_table, stride_parts, scale, cap, window, shared,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
    MOVED: tl.constexpr, LIST: tl.constexpr, ENDS: tl.constexpr, RECIPROCAL: tl.constexpr,
):  # fmt: skip
    g, b, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = length_of(rows_ptr, lengths_ptr, b, ENDS)
    low = tl.maximum(length - 1 - window, 0) if WINDOW else 0
    begin = low // BLOCK_S * BLOCK_S
    first, last = begin // SPLIT, tl.cdiv(length, SPLIT)
    if first + share >= last:
        return
    rm, rd = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    valid, h = rm < GROUP, g * GROUP + tl.minimum(rm, GROUP - 1)
    q_at = q_ptr + b.to(tl.int64) * stride_qt + h[:, None] * stride_qh + rd[None, :]
    q = tl.load(q_at, mask=(rd < D)[None, :], other=0.0)  # [BLOCK_M, BLOCK_D]
    position = tl.zeros((BLOCK_M,), tl.int32) + length - 1
    row = tl.load(rows_ptr + b).to(tl.int64)
    table = table_ptr + (row - length if LIST else row * stride_table)
    k_at, v_at = k_ptr + g * stride_kg, v_ptr + g * stride_vg
    log2 = log2_of(scale, CAP)
    # The splits of this program, and the tiles of all of them but those before and behind the keys.
    mine = tl.cdiv(last - first - share, shared)
    final = first + share + (mine - 1) * shared
    behind = tl.maximum(final * SPLIT + SPLIT - length, 0) // BLOCK_S
    before = tl.maximum(begin - (first + share) * SPLIT, 0) // BLOCK_S
    top, total, acc = empty(BLOCK_M, BLOCK_D)
    top_s, total_s, acc_s = empty(BLOCK_M, BLOCK_D)
    for i in range(before, mine * (SPLIT // BLOCK_S) - behind):
        split = first + share + i // (SPLIT // BLOCK_S) * shared
        here = split * SPLIT + i % (SPLIT // BLOCK_S) * BLOCK_S
        top_s, total_s, acc_s = one_tile(
            top_s, total_s, acc_s, q, k_at, v_at, table, moved_ptr, stride_ks, stride_vs, here,
            low, length, position, scale, cap, window, D, BLOCK_D, BLOCK_S, True, WINDOW, CAP,
            MOVED,
        )  # fmt: skip
        if (here + BLOCK_S) % SPLIT == 0 or here + BLOCK_S >= length:
            if PARTS:
                kept = valid & (last - first > 1)
                at = b.to(tl.int64) * stride_parts + h * (stride_parts // H) + split
                part = parts_ptr + at[:, None] * D + rd[None, :]
                tl.store(part, acc_s, mask=kept[:, None] & (rd < D)[None, :])
                tl.store(tops_ptr + at, top_s, mask=kept)
                tl.store(totals_ptr + at, tl.max(total_s, axis=1), mask=kept)
            top, total, acc = merged(top, total, acc, top_s, total_s, acc_s, log2)
            top_s, total_s, acc_s = empty(BLOCK_M, BLOCK_D)
    if not PARTS or last - first == 1:
        finish(
            top, tl.max(total, axis=1)[:, None], acc, log2, b + rm * 0, h, valid, o_ptr, lse_ptr,
            sinks_ptr, stride_ot, stride_oh, H, D, BLOCK_D, SINKS, LSE, RECIPROCAL,
        )  # fmt: skip


@triton.jit(do_not_specialize=["window"])
def _merge_splits_kernel(
    o_ptr, lse_ptr, rows_ptr, lengths_ptr, sinks_ptr, parts_ptr, tops_ptr, totals_ptr,
    stride_ot, stride_oh, stride_parts, scale, window,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    SPLIT: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    LSE: tl.constexpr, AT_ONCE: tl.constexpr, ENDS: tl.constexpr, RECIPROCAL: tl.constexpr,
):  # fmt: skip
    head, b = tl.program_id(0), tl.program_id(1)
    length = length_of(rows_ptr, lengths_ptr, b, ENDS)
    begin = tl.maximum(length - 1 - window, 0) // BLOCK_S * BLOCK_S if WINDOW else 0
    first, last = begin // SPLIT, tl.cdiv(length, SPLIT)
    if last - first <= 1:
        return
    rd, h = tl.arange(0, BLOCK_D), head + tl.arange(0, 1)
    top = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1, 1), tl.float32)
    acc = tl.zeros((1, BLOCK_D), tl.float32)
    log2 = log2_of(scale, CAP)
    at = b.to(tl.int64) * stride_parts + h * (stride_parts // H)  # [1]
    for some in range(first, last, AT_ONCE):
        parts, tops, totals = (), (), ()
        for i in tl.static_range(AT_ONCE):  # all loads first, so that they are under way together
            there = (h < H) & (some + i < last)
            part = parts_ptr + (at + some + i)[:, None] * D + rd[None, :]
            parts += (tl.load(part, mask=(rd < D)[None, :] & there[:, None], other=0.0),)
            tops += (tl.load(tops_ptr + at + some + i, mask=there, other=float("-inf")),)
            totals += (tl.load(totals_ptr + at + some + i, mask=there, other=0.0)[:, None],)
        for i in tl.static_range(AT_ONCE):
            top, total, acc = merged(top, total, acc, tops[i], totals[i], parts[i], log2)
    finish(
        top, total, acc, log2, b + h * 0, h, h < H, o_ptr, lse_ptr, sinks_ptr, stride_ot,
        stride_oh, H, D, BLOCK_D, SINKS, LSE, RECIPROCAL,
    )  # fmt: skip


def decode_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor | None,
    options: Options,
    *,
    work: Work | None = None,
    shared: int = 1,
    launch: Launch | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """The attention of the header, by ``shared`` programs for each request and key head.

    More than one needs ``work``; ``launch`` is as free. Raises ValueError on what the kernel does
    not hold.
    """
    heads, d = check(q, k_pool, v_pool)
    if shared > 1 and (work is None or not work.holds(len(q), heads, d)):
        needs = f"{len(q)} requests of {heads} heads of {d}"
        raise ValueError(f"{shared} programs a request need work memory for {needs}")
    o = torch.empty_like(q) if out is None else out
    if not len(q):
        return o
    group, groups = heads // k_pool.shape[1], k_pool.shape[1]
    kept = options.order or order.own(d, q.device)
    launch = launch or launch_for(groups * len(q) * shared, d, kept.block, q.device)
    parts, tops, totals = (work.parts, work.tops, work.totals) if shared > 1 else (None,) * 3
    stride_parts = parts.stride(0) // d if shared > 1 else 0
    stride_table = 0 if table.dim() == 1 else table.stride(0)
    same = {
        **{"H": heads, "D": d, "BLOCK_D": triton.next_power_of_2(d), "BLOCK_S": kept.block},
        **{"SPLIT": kept.split, "WINDOW": options.window >= 0, "CAP": options.cap > 0},
        **{"SINKS": options.sinks is not None, "LSE": lse is not None, "ENDS": lengths is None},
        **{"RECIPROCAL": kept.reciprocal, "enable_fp_fusion": False},
    }
    pools = (q, k_pool, v_pool, o)
    _decode_attention_kernel[(groups, len(q), shared)](
        *pools, lse, table, options.moved, rows, lengths, options.sinks, parts, tops, totals,
        *(x.stride(i) for x in pools for i in (0, 1)), stride_table, stride_parts,
        options.scale, options.cap or 1.0, options.window, shared, GROUP=group,
        BLOCK_M=max(16, triton.next_power_of_2(group)), PARTS=shared > 1,
        MOVED=options.moved is not None, LIST=table.dim() == 1,
        num_warps=launch.warps, num_stages=launch.stages, **same,
    )  # fmt: skip
    if shared > 1:
        _merge_splits_kernel[(heads, len(q))](
            o, lse, rows, lengths, options.sinks, parts, tops, totals,
            *(o.stride(i) for i in (0, 1)), stride_parts, options.scale, options.window,
            AT_ONCE=_AT_ONCE, num_warps=2, **same,
        )  # fmt: skip
    return o
