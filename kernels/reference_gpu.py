"""The Triton kernels' twins in plain PyTorch, in fp32 and in the kernels' orders; slow.

`row_sum`, `mean` and the norms are equal to their kernels bit for bit, on any device: sums,
products, roots and quotients are correctly rounded in both. `log_softmax` and `softmax` are near,
since each device has its own exp and log.
"""

from __future__ import annotations

import torch

from sgl_det.kernels import rms_norm as norms
from sgl_det.kernels import row_sum as rows


def tree_sum(lanes: torch.Tensor) -> torch.Tensor:
    """lanes [..., L], L a power of two -> [...]: neighbours first."""
    while lanes.shape[-1] > 1:
        lanes = lanes[..., 0::2] + lanes[..., 1::2]
    return lanes[..., 0]


def _by_lane(x: torch.Tensor, lanes: int) -> torch.Tensor:
    """x [N, V] fp32 -> [N, lanes]: element i added to lane i mod lanes, ascending."""
    total = torch.zeros((len(x), lanes), device=x.device)
    for tile in torch.nn.functional.pad(x, (0, -x.shape[1] % lanes)).split(lanes, dim=1):
        total = total + tile
    return total


def row_sum(
    x: torch.Tensor, *, divisor: float | None = None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """x [N, V] -> [N]."""
    while True:
        order = rows.reduction_order(v=x.shape[1], dtype=x.dtype)
        splits = x.float().split(order.split or x.shape[1], dim=1)
        x = torch.stack([tree_sum(_by_lane(part, order.lanes)) for part in splits], dim=1)
        if len(splits) == 1:
            break
    y = x[:, 0]
    # A quotient of fp32 numbers is rounded correctly if it is first rounded to fp64.
    return (y if divisor is None else (y.double() / divisor).float()).to(dtype)


def mean(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``x.mean(dim)`` for one axis."""
    last = x.movedim(dim, -1)
    y = row_sum(last.reshape(-1, x.shape[dim]), divisor=x.shape[dim], dtype=dtype or x.dtype)
    return y.view(last.shape[:-1])


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    gemma: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [T, D], weight [D] -> (y of x's dtype, x + residual of the residual's)."""
    h = x.float() if residual is None else x.float() + residual.float()
    d = h.shape[1]
    order = norms.reduction_order(d=d, dtype=x.dtype)
    mean = (tree_sum(_by_lane(h * h, order.lanes)).double() / d).float()
    root = torch.sqrt((mean + torch.tensor(eps, device=h.device)).double()).float()
    scale = (1.0 / root.double()).float()
    w = weight.float() + 1.0 if gemma else weight.float()
    y = h * scale[:, None] * w
    return y.to(x.dtype), h.to(x.dtype if residual is None else residual.dtype)


def log_softmax(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """x [N, V] -> [N, V]."""
    top, total = _top_and_total(x)
    return ((x.float() - top) - torch.log(total)).to(dtype or x.dtype)


def softmax(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """x [N, V] -> [N, V]."""
    top, total = _top_and_total(x)
    return (torch.exp(x.float() - top) * (1.0 / total)).to(dtype or x.dtype)


def _top_and_total(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [N, V] -> the maximum and the sum of exp(x - maximum), both [N, 1]."""
    order = rows.reduction_order(v=x.shape[1], dtype=x.dtype)
    splits = x.float().split(order.split or x.shape[1], dim=1)
    tops = torch.stack([part.amax(dim=1) for part in splits], dim=1)
    parts = [
        torch.exp(part - _finite(top)[:, None])
        for part, top in zip(splits, tops.unbind(1), strict=True)
    ]
    sums = torch.stack([tree_sum(_by_lane(part, order.lanes)) for part in parts], dim=1)
    top = tops.amax(dim=1, keepdim=True)
    scaled = sums * torch.exp(tops - _finite(top))
    width = 1 << (scaled.shape[1] - 1).bit_length()
    return top, tree_sum(torch.nn.functional.pad(scaled, (0, width - scaled.shape[1])))[:, None]


def _finite(top: torch.Tensor) -> torch.Tensor:
    """A split of only -inf is shifted by 0: its exponentials are 0, not NaN."""
    return torch.where(torch.isneginf(top), torch.zeros_like(top), top)
