"""Ordered sum along rows:  y[n] = sum_v x[n, v], or that over a divisor

Shapes      x [N, V] -> y [N]             N rows, any stride; V elements, stride 1
Dtypes      x: bf16 | fp16 | fp32; sums in fp32; y fp32, or one rounding to another dtype on store
Order       splits of SPLIT elements; in a split element i belongs to lane i mod LANES, a lane adds
            its elements in ascending order, the lanes are added in a tree, neighbours first; the
            splits' sums are a row of their own, summed the same way
Bits depend on   V - not on N, dtype, strides, alignment, num_warps, rows a program or the GPU

Every step of the tree adds two numbers, and without FMAs: where a layout keeps them cannot show.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_det.kernels.order import ReductionOrder

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SPLIT = 4096
_LANES = 2048


def reduction_order(*, v: int, dtype: torch.dtype, arch: int | None = None) -> ReductionOrder:
    """The order of a row of ``v`` elements. Raises ValueError on a dtype that is not held."""
    if dtype not in DTYPES or v < 1:
        raise ValueError(f"no reduction order for rows of {v} elements of {dtype}")
    lanes = min(_LANES, triton.next_power_of_2(v))
    split = SPLIT if v > SPLIT else None
    return ReductionOrder(axis="V", block=lanes, lanes=lanes, split=split)


@triton.jit
def tree_sum(x, ROWS: tl.constexpr, LANES: tl.constexpr):
    """x [ROWS, LANES] fp32 -> [ROWS]: lanes 0+1, 2+3, ..., then neighbours of those, to one."""
    WARPS: tl.constexpr = LANES // 128
    for i in tl.static_range(LANES.bit_length() - 1):
        if LANES >= 512 and LANES >> i == WARPS:
            # Every warp gets the rest at the price of one barrier; a step across warps costs two.
            x = tl.gather(tl.reshape(x, (ROWS * WARPS,)), tl.arange(0, ROWS * WARPS), 0)
        x = tl.sum(tl.reshape(x, (ROWS, LANES >> (i + 1), 2)), axis=2)
    return tl.reshape(x, (ROWS,))


@triton.jit(do_not_specialize=["N", "divisor"])
def _row_sum_kernel(
    x_ptr,
    y_ptr,
    x_stride_n,
    N,
    V,
    divisor,
    SPLITS: tl.constexpr,
    TILES: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DIVIDE: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    rows = n.to(tl.int64)[:, None] * x_stride_n
    acc = tl.zeros((BLOCK_N, LANES), tl.float32)
    for i in tl.static_range(TILES):
        v = (split * TILES + i) * LANES + tl.arange(0, LANES)
        mask = (n < N)[:, None] & (v < V)[None, :]
        acc += tl.load(x_ptr + rows + v[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tree_sum(acc, BLOCK_N, LANES)  # [BLOCK_N]
    if DIVIDE:
        y = tl.div_rn(y, divisor)
    out = y_ptr + n.to(tl.int64) * SPLITS + split
    tl.store(out, y.to(y_ptr.dtype.element_ty), mask=n < N)


def row_sum(
    x: torch.Tensor, *, divisor: float | None = None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """x [N, V] -> the sums of its rows [N], over ``divisor`` if one is given, as ``dtype``.

    Raises ValueError unless x is a matrix of a dtype above with stride 1 along V.
    """
    check_rows("row_sum", x)
    while True:
        n, v = x.shape
        order = reduction_order(v=v, dtype=x.dtype)
        splits = triton.cdiv(v, order.split or v)
        last = splits == 1
        y = torch.empty((n, splits), dtype=dtype if last else torch.float32, device=x.device)
        rows = rows_a_program(order)
        if n:
            _row_sum_kernel[(triton.cdiv(n, rows), splits)](
                x,
                y,
                x.stride(0) if n > 1 else v,
                n,
                v,
                1.0 if divisor is None else float(divisor),
                SPLITS=splits,
                TILES=triton.cdiv(min(v, SPLIT), order.block),
                LANES=order.block,
                BLOCK_N=rows,
                DIVIDE=last and divisor is not None,
                num_warps=warps(order),
                enable_fp_fusion=False,
            )
        if last:
            return y.view(n)
        x = y


def rows_a_program(order: ReductionOrder) -> int:
    """How many rows share a program: short ones fill it together."""
    return max(1, _LANES // order.block)


def warps(order: ReductionOrder) -> int:
    """Warps of a program whose tile is `rows_a_program` rows of ``order.block`` lanes."""
    return 8 if order.block >= 2048 else 4


def check_rows(name: str, x: torch.Tensor) -> None:
    """Raise ValueError unless x is [N, V] of a dtype that is held, with stride 1 along V."""
    if x.dtype not in DTYPES:
        held = ", ".join(str(d) for d in DTYPES)
        raise ValueError(f"{name}: x is {x.dtype}, expected one of {held}")
    if x.dim() != 2 or x.shape[1] < 1 or (x.stride(1) != 1 and x.shape[1] > 1):
        raise ValueError(
            f"{name}: x is {tuple(x.shape)} with strides {x.stride()}, expected [N, V] "
            f"with V > 0 and stride 1 along V"
        )
