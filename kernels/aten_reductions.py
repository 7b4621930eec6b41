"""PyTorch's softmax, log_softmax and mean on the GPU, in orders that the reduced length decides.

PyTorch's own kernels choose vector widths by alignment and blocks by the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from sgl_det.kernels.log_softmax import log_softmax, softmax
from sgl_det.kernels.matmul import DTYPES
from sgl_det.kernels.mean import mean

NAMES = ("_log_softmax", "_softmax", "mean.dim")


def implementations(theirs: Mapping[str, Callable]) -> dict[str, Callable]:
    """Functions by operator; ``theirs`` has PyTorch's kernels, for types not held here."""
    return {
        "_log_softmax": partial(_along, log_softmax, theirs["_log_softmax"]),
        "_softmax": partial(_along, softmax, theirs["_softmax"]),
        "mean.dim": partial(_mean, theirs["mean.dim"]),
    }


def _along(function, original, x, dim, half_to_float):
    if x.dtype not in DTYPES or x.dim() == 0 or not x.numel():
        return original(x, dim, half_to_float)
    moved = x.movedim(dim, -1)
    flat = moved.reshape(-1, moved.shape[-1])
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    y = function(flat, torch.float32 if half_to_float else x.dtype)
    return y.view(moved.shape).movedim(-1, dim).contiguous()


def _mean(original, x, dim, keepdim=False, *, dtype=None):
    if x.dtype not in DTYPES or not x.numel() or (dtype or x.dtype) not in DTYPES or x.dim() == 0:
        return original(x, dim, keepdim, dtype=dtype)
    axes = sorted(d % x.dim() for d in dim) if dim else list(range(x.dim()))
    last = tuple(range(x.dim() - len(axes), x.dim()))
    y = mean(x.movedim(axes, last), last, dtype=dtype)
    if not keepdim:
        return y
    return y.view([1 if i in axes else size for i, size in enumerate(x.shape)])
