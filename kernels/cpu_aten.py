"""PyTorch's matrix products on the CPU, in the order of `cpu.linear`.

Overrides mm, addmm and bmm in the dispatcher, so that whatever calls them gets bits that do not
depend on the number of rows. Types that the kernel does not hold keep PyTorch's own code.
"""

from __future__ import annotations

import torch

from sgl_det.kernels.cpu import DTYPES, linear


def override() -> torch.library.Library:
    """Install the overrides; they last until ``_destroy()`` is called on what is returned."""
    library = torch.library.Library("aten", "IMPL")
    for name, function in (("mm", _mm), ("addmm", _addmm), ("bmm", _bmm)):
        library.impl(f"aten::{name}", function, "CPU")
    return library


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.dtype not in DTYPES:
        return torch.ops.aten.mm.out(a, b, out=a.new_empty((a.shape[0], b.shape[1])))
    return linear(a, b.t().contiguous())


def _addmm(
    bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    if a.dtype in DTYPES and alpha == 1 and beta == 1 and bias.dim() == 1:
        return linear(a, b.t().contiguous(), bias.contiguous())
    y = _mm(a, b)
    y = y if alpha == 1 else y * alpha
    return y if beta == 0 else y + (bias if beta == 1 else bias * beta)


def _bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.dtype not in DTYPES:
        return torch.ops.aten.bmm.out(a, b, out=a.new_empty((*a.shape[:2], b.shape[2])))
    if not len(a):
        return a.new_empty((0, a.shape[1], b.shape[2]))
    return torch.stack([_mm(x, y) for x, y in zip(a, b, strict=True)])
