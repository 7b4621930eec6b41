"""Softmax along rows:  y[n, v] = x[n, v] - max_v(x[n, :]) - log(sum_v exp(x[n, :] - max))

softmax is exp(x - max) / sum of the same maximum and sum.

Shapes      x, y [N, V]             N rows, any stride; V vocabulary, stride 1
Dtypes      x: bf16 | fp16 | fp32; arithmetic in fp32; y: x's or another, one rounding on store
Order       splits of SPLIT elements, each with its own maximum; in a split element i belongs to
            lane i mod LANES, a lane adds in ascending order, the lanes in a tree, neighbours
            first; the splits' sums, scaled to the row's maximum, are added in one such tree
Bits depend on   V, the GPU (exp and log) - not on N, dtype, strides, num_warps or the grid

A maximum is exact in any order. A split of only -inf has the sum 0 and adds 0 * exp(-inf), an exact
zero. A row of only -inf gives NaN, as PyTorch's does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_det.kernels import row_sum as rows
from sgl_det.kernels.order import ReductionOrder
from sgl_det.kernels.row_sum import SPLIT, tree_sum


def reduction_order(*, v: int, dtype: torch.dtype, arch: int | None = None) -> ReductionOrder:
    """The order of a row of ``v`` elements: that of `row_sum`."""
    return rows.reduction_order(v=v, dtype=dtype, arch=arch)


@triton.jit(do_not_specialize=["S"])
def _split_kernel(
    x_ptr, max_ptr, sum_ptr, x_stride_n, V, S, TILES: tl.constexpr, LANES: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    top = tl.full((1, LANES), float("-inf"), tl.float32)
    tiles = ()
    for i in tl.static_range(TILES):
        v = ((split * TILES + i) * LANES + tl.arange(0, LANES))[None, :]
        x = tl.load(x_ptr + n * x_stride_n + v, mask=v < V, other=float("-inf"))
        tiles += (x.to(tl.float32),)  # [1, LANES]
        top = tl.maximum(top, tiles[i])
    top = tl.max(top, axis=1)  # [1]
    # Of a split without a finite element: -inf - -inf would be NaN.
    shift = tl.where(top == float("-inf"), 0.0, top)
    acc = tl.zeros((1, LANES), tl.float32)
    for i in tl.static_range(TILES):
        acc += tl.exp(tiles[i] - shift[:, None])
    place = n * S + split + tl.arange(0, 1)
    tl.store(max_ptr + place, top)
    tl.store(sum_ptr + place, tree_sum(acc, 1, LANES))


@triton.jit(do_not_specialize=["S"])
def _normalize_kernel(
    x_ptr,
    max_ptr,
    sum_ptr,
    y_ptr,
    x_stride_n,
    y_stride_n,
    V,
    S,
    BLOCK_S: tl.constexpr,
    TILES: tl.constexpr,
    LANES: tl.constexpr,
    LOG: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    s = tl.arange(0, BLOCK_S)[None, :]
    tops = tl.load(max_ptr + n * S + s, mask=s < S, other=float("-inf"))  # [1, BLOCK_S]
    sums = tl.load(sum_ptr + n * S + s, mask=s < S, other=0.0)
    top = tl.max(tops, axis=1)[:, None]  # [1, 1]
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tree_sum(sums * tl.exp(tops - shift), 1, BLOCK_S)[:, None]
    last = tl.log(total) if LOG else tl.div_rn(1.0, total)
    for i in tl.static_range(TILES):
        v = ((split * TILES + i) * LANES + tl.arange(0, LANES))[None, :]
        x = tl.load(x_ptr + n * x_stride_n + v, mask=v < V, other=0.0).to(tl.float32) - top
        y = x - last if LOG else tl.exp(x) * last
        tl.store(y_ptr + n * y_stride_n + v, y.to(y_ptr.dtype.element_ty), mask=v < V)


def log_softmax(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """x [..., V] -> log_softmax along V, contiguous, of ``dtype`` or of x's.

    Raises ValueError on other dtypes or strides than the header's.
    """
    return _launch("log_softmax", x, dtype or x.dtype, log=True)


def softmax(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """x [..., V] -> softmax along V, contiguous, of ``dtype`` or of x's.

    Raises ValueError on other dtypes or strides than the header's.
    """
    return _launch("softmax", x, dtype or x.dtype, log=False)


def _launch(name: str, x: torch.Tensor, dtype: torch.dtype, *, log: bool) -> torch.Tensor:
    if x.dim() < 1 or dtype not in rows.DTYPES:
        raise ValueError(f"{name}: x has {x.dim()} axes for a result of {dtype}")
    matrix = x.reshape(-1, x.shape[-1]) if x.dim() != 2 else x
    rows.check_rows(name, matrix)
    n, v = matrix.shape
    order = reduction_order(v=v, dtype=x.dtype)
    splits = triton.cdiv(v, order.split or v)
    y = torch.empty((n, v), dtype=dtype, device=x.device)
    if not n:
        return y.view(x.shape)
    tops, sums = torch.empty((2, n, splits), dtype=torch.float32, device=x.device)
    stride = matrix.stride(0) if n > 1 else v
    same = {
        "TILES": triton.cdiv(min(v, SPLIT), order.block),
        "LANES": order.block,
        "num_warps": rows.warps(order),
        "enable_fp_fusion": False,
    }
    _split_kernel[(n, splits)](matrix, tops, sums, stride, v, splits, **same)
    _normalize_kernel[(n, splits)](
        matrix,
        tops,
        sums,
        y,
        stride,
        v,
        v,
        splits,
        BLOCK_S=triton.next_power_of_2(splits),
        LOG=log,
        **same,
    )
    return y.view(x.shape)
