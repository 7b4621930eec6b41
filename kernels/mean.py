"""Mean:  y[a, b] = sum_r x[a, r, b] / R

Shapes      x of any rank, seen as [A, R, B]: R is one axis, or several last ones as one
Dtypes      x: bf16 | fp16 | fp32; the sum in fp32, the quotient correctly rounded; y: x's or
            another, one rounding on store
Order       that of `row_sum` along R; another axis than the last is made the last by a copy
Bits depend on   R - not on A, B, strides or which axis R is
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from sgl_det.kernels import row_sum as rows
from sgl_det.kernels.order import ReductionOrder


def reduction_order(*, r: int, dtype: torch.dtype, arch: int | None = None) -> ReductionOrder:
    """The order of a mean over ``r`` elements: that of `row_sum`."""
    return replace(rows.reduction_order(v=r, dtype=dtype, arch=arch), axis="R")


def mean(
    x: torch.Tensor,
    dim: int | Sequence[int],
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``x.mean(dim, keepdim, dtype=dtype)`` for one axis, or for the last ones.

    Raises ValueError on an empty mean, other axes, and dtypes that are not held.
    """
    axes = _axes(x, dim)
    dtype = dtype or x.dtype
    r = 1
    for axis in axes:
        r *= x.shape[axis]
    if dtype not in rows.DTYPES or r < 1:
        raise ValueError(f"mean: {r} elements of {x.dtype} to {dtype} are not held")
    kept = [1 if i in axes else size for i, size in enumerate(x.shape)]
    last = x.movedim(axes[0], -1) if len(axes) == 1 else x
    matrix = last.reshape(-1, r)
    if matrix.stride(1) != 1:
        matrix = matrix.contiguous()
    y = rows.row_sum(matrix, divisor=r, dtype=dtype)
    return y.view(kept if keepdim else [x.shape[i] for i in range(x.dim()) if i not in axes])


def _axes(x: torch.Tensor, dim: int | Sequence[int]) -> list[int]:
    """The axes as ascending numbers from 0. Raises ValueError unless one, or the last ones."""
    given = [dim] if isinstance(dim, int) else list(dim)
    axes = sorted({d + x.dim() if d < 0 else d for d in given})
    fits = axes and 0 <= axes[0] and axes[-1] < x.dim() and len(axes) == len(given)
    if not fits or (len(axes) > 1 and axes != list(range(x.dim() - len(axes), x.dim()))):
        raise ValueError(
            f"mean: dim is {dim} for {x.dim()} axes, expected one axis or the last ones"
        )
    return axes
