"""Attention of many new tokens (prefill, chunk, extend) over their keys in the pool

Order and bits: `attention_order`. A program takes BLOCK_M rows, a row being one query head of one
token; heads that share a key head lie side by side, so that its keys are read once.

Shapes      q, o [T, H, D]   k_pool, v_pool [slots, G, D]   table [requests, longest] of slots
            request b: T from starts[b] to starts[b + 1], the last of its lengths[b] keys,
            keys in table[rows[b], 0 .. lengths[b]]   lse [T, H] or None, natural logarithm
Dtypes      q, pools, o: bf16 | fp16; table int32; starts, rows, lengths int32 or int64; lse fp32
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sgl_det.kernels import attention_order as order
from sgl_det.kernels.attention_order import Order, empty, finish, log2_of, merged, some_tiles


@dataclass(frozen=True, slots=True)
class Options:
    """What a layer asks for beside q, k and v.

    scale    of the scores
    cap      bound of cap * tanh(score / cap), or 0
    window   keys before the query that it sees, or -1 for all
    sinks    [H] fp32 scores of a key without value, or None
    moved    int: where the slots of the table lie in this layer's pool, or None where they are
    order    another than the Triton backend's own
    """

    scale: float
    cap: float = 0.0
    window: int = -1
    sinks: torch.Tensor | None = None
    moved: torch.Tensor | None = None
    order: Order | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """How a launch is cut up: rows a program, warps, tiles in flight. Any choice, the same bits."""

    rows: int
    warps: int
    stages: int


@triton.jit(do_not_specialize=["window"])
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, table_ptr, moved_ptr, starts_ptr, rows_ptr,
    lengths_ptr, sinks_ptr,
    stride_qt, stride_qh, stride_ks, stride_kg, stride_vs, stride_vg, stride_ot, stride_oh,
    stride_table, scale, cap, window,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
    MOVED: tl.constexpr, RECIPROCAL: tl.constexpr,
):  # fmt: skip
    b, g = tl.program_id(2), tl.program_id(1)
    start = tl.load(starts_ptr + b).to(tl.int32)
    new = tl.load(starts_ptr + b + 1).to(tl.int32) - start
    # The last tiles see the most keys: they go first.
    tile = tl.cdiv(new * GROUP, BLOCK_M) - 1 - tl.program_id(0)
    if tile < 0:
        return
    old = tl.load(lengths_ptr + b).to(tl.int32) - new
    r, rd = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    t, h = tl.minimum(r // GROUP, new - 1), g * GROUP + r % GROUP
    q_at = q_ptr + (start + t).to(tl.int64)[:, None] * stride_qt + h[:, None] * stride_qh
    q = tl.load(q_at + rd[None, :], mask=(rd < D)[None, :], other=0.0)  # [BLOCK_M, BLOCK_D]
    lowest = old + tile * BLOCK_M // GROUP
    highest = old + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, new - 1)
    table = table_ptr + tl.load(rows_ptr + b).to(tl.int64) * stride_table
    k_at, v_at = k_ptr + g * stride_kg, v_ptr + g * stride_vg
    # Every row sees the tiles from full_lo to full_hi whole.
    begin, low, full_lo, full_hi = 0, 0, 0, (lowest + 1) // BLOCK_S * BLOCK_S
    if WINDOW:
        low = tl.maximum(lowest - window, 0)
        begin = low // BLOCK_S * BLOCK_S
        full_lo = tl.cdiv(tl.maximum(highest - window, 0), BLOCK_S) * BLOCK_S
        full_hi = tl.maximum(full_hi, full_lo)
    top, total, acc = empty(BLOCK_M, BLOCK_D)
    top_s, total_s, acc_s = empty(BLOCK_M, BLOCK_D)
    hi = highest + 1
    if WINDOW:
        top, total, acc, top_s, total_s, acc_s = some_tiles(
            top, total, acc, top_s, total_s, acc_s, q, k_at, v_at, table, moved_ptr, stride_ks,
            stride_vs, begin, tl.minimum(full_lo, hi), low, hi, old + t, scale, cap, window,
            BLOCK_M, D, BLOCK_D, BLOCK_S, SPLIT, True, WINDOW, CAP, MOVED,
        )  # fmt: skip
    top, total, acc, top_s, total_s, acc_s = some_tiles(
        top, total, acc, top_s, total_s, acc_s, q, k_at, v_at, table, moved_ptr, stride_ks,
        stride_vs, full_lo, full_hi, low, hi, old + t, scale, cap, window,
        BLOCK_M, D, BLOCK_D, BLOCK_S, SPLIT, False, WINDOW, CAP, MOVED,
    )  # fmt: skip
    top, total, acc, top_s, total_s, acc_s = some_tiles(
        top, total, acc, top_s, total_s, acc_s, q, k_at, v_at, table, moved_ptr, stride_ks,
        stride_vs, full_hi, hi, low, hi, old + t, scale, cap, window,
        BLOCK_M, D, BLOCK_D, BLOCK_S, SPLIT, True, WINDOW, CAP, MOVED,
    )  # fmt: skip
    log2 = log2_of(scale, CAP)
    top, total, acc = merged(top, total, acc, top_s, total_s, acc_s, log2)
    finish(
        top, tl.max(total, axis=1)[:, None], acc, log2, start + t, h, r < new * GROUP, o_ptr,
        lse_ptr, sinks_ptr, stride_ot, stride_oh, H, D, BLOCK_D, SINKS, LSE, RECIPROCAL,
    )  # fmt: skip


def attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    most_new: int,
    options: Options,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """The attention of the header; ``most_new``: the most new tokens of one request.

    Raises ValueError on shapes, dtypes or strides that the kernel does not hold.
    """
    heads, d = check(q, k_pool, v_pool)
    o = torch.empty_like(q) if out is None else out
    group = heads // k_pool.shape[1]
    if not len(q):
        return o
    kept = options.order or order.own(d, q.device)
    launch = launch or _launch(q, most_new * group, options, kept.block)
    grid = (triton.cdiv(most_new * group, launch.rows), k_pool.shape[1], len(lengths))
    _attention_kernel[grid](
        q, k_pool, v_pool, o, lse, table, options.moved, starts, rows, lengths, options.sinks,
        *(x.stride(i) for x in (q, k_pool, v_pool, o) for i in (0, 1)), table.stride(0),
        options.scale, options.cap or 1.0, options.window, H=heads, GROUP=group, D=d,
        BLOCK_D=triton.next_power_of_2(d), BLOCK_M=launch.rows, BLOCK_S=kept.block,
        SPLIT=kept.split, WINDOW=options.window >= 0, CAP=options.cap > 0,
        SINKS=options.sinks is not None, LSE=lse is not None, MOVED=options.moved is not None,
        RECIPROCAL=kept.reciprocal, num_warps=launch.warps, num_stages=launch.stages,
        enable_fp_fusion=False,
    )  # fmt: skip
    return o


def launch_for(
    rows: int, d: int, tile: int, *, plain: bool = True, shared_kib: int = 227
) -> Launch:
    """A launch for requests of at most so many rows, and tiles of ``tile`` keys.

    plain        without a window and a cap, for whose sake a program has half the rows
    shared_kib   shared memory that a program may have; little of it holds half the rows of large
                 heads
    """
    small = d > 128 and shared_kib < 128
    largest = (128 if d <= 128 else 64) // (1 if plain and not small else 2)
    m = min(largest, max(16, triton.next_power_of_2(rows)))
    return Launch(m, 8 if m * d >= 64 * 64 else 4, 2 if small or tile > 64 else 3)


def _launch(q: torch.Tensor, rows: int, options: Options, tile: int) -> Launch:
    plain = options.window < 0 and not options.cap
    d = q.shape[2]
    return launch_for(rows, d, tile, plain=plain, shared_kib=shared_kib(q.device))


@functools.cache
def shared_kib(device: torch.device) -> int:
    """Shared memory that a program may have, in KiB; an interpreter has an H200's."""
    if device.type != "cuda":
        return 227
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin // 1024


def check(q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor) -> tuple[int, int]:
    """(H, D). Raises ValueError unless q [T, H, D] and the pools [slots, G, D] fit each other."""
    (_, heads, d), (_, groups, dk) = q.shape, k_pool.shape
    order.reduction_order(d=d, dtype=q.dtype, arch=0)
    dtypes = {q.dtype, k_pool.dtype, v_pool.dtype}
    if dk != d or v_pool.shape != k_pool.shape or heads % groups or len(dtypes) != 1:
        raise ValueError(
            f"q {tuple(q.shape)} {q.dtype}, k {tuple(k_pool.shape)} {k_pool.dtype} and v "
            f"{tuple(v_pool.shape)} {v_pool.dtype} do not fit [T, H, D], [slots, G, D], H % G == 0"
        )
    if any(x.stride(2) != 1 for x in (q, k_pool, v_pool)):
        raise ValueError("q, k and v need stride 1 along D")
    return heads, d
