"""PyTorch's matrix products and reductions on the GPU, in the orders of our kernels.

Whatever a model calls ends here: mm, addmm, bmm, baddbmm, mv, addmv, softmax, log_softmax, mean,
their forms that write into a tensor, and through them linear, matmul and einsum. Types that our
kernels do not hold keep PyTorch's own kernel.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import torch

from sgl_det.kernels import aten_reductions, cublas
from sgl_det.kernels.linear import linear
from sgl_det.kernels.matmul import DTYPES, matmul

_NAMES = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv")
_CUDA_ONLY = ("mm.dtype",)
# The forms that write into a given tensor, and the operator whose result they write.
_OUT = {f"{name}.out": name for name in ("mm", "addmm", "bmm", "baddbmm", "addmv")}
_OUT |= {f"{name}.out": name for name in ("_softmax", "_log_softmax")} | {"mean.out": "mean.dim"}
_IN_PLACE = {f"{name}_": name for name in ("addmm", "baddbmm", "addmv")}


class Overrides:
    """The overrides of one process; `undo` leaves nothing behind. key: PyTorch's dispatch key."""

    def __init__(self, key: str = "CUDA") -> None:
        products = (*_NAMES, *(_CUDA_ONLY if key == "CUDA" else ()))
        names = (*products, *aten_reductions.NAMES)
        self._theirs = {name: cublas.original(name, key) for name in names}
        ours = {name: getattr(self, f"_{name.replace('.', '_')}") for name in products}
        ours |= aten_reductions.implementations(self._theirs)
        ours |= {form: partial(_write, ours[name]) for form, name in _OUT.items()}
        ours |= {form: partial(_update, ours[name]) for form, name in _IN_PLACE.items()}
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for name, function in ours.items():
                self._library.impl(f"aten::{name}", function, key, allow_override=True)
        self._allow_split_k: Callable[[], None] | None = cublas.forbid_split_k()

    def undo(self) -> None:
        """Give PyTorch its kernels back. Calling it twice is calling it once."""
        if self._allow_split_k is not None:
            self._library._destroy()
            self._allow_split_k()
            self._allow_split_k = None

    def _mm(self, a, b):
        if not _held(a, b):
            return self._theirs["mm"](a, b)
        return linear(a, _k_last(b))

    def _mm_dtype(self, a, b, out_dtype):
        if not _held(a, b) or out_dtype != torch.float32:
            return self._theirs["mm.dtype"](a, b, out_dtype)
        out = a.new_empty((len(a), b.shape[1]), dtype=out_dtype)
        return matmul(a, _k_last(b), out=out) if out.numel() else out

    def _addmm(self, bias, a, b, *, beta=1, alpha=1):
        if not _held(a, b, bias):
            return self._theirs["addmm"](bias, a, b, beta=beta, alpha=alpha)
        if alpha == 1 and beta == 1 and bias.dim() == 1 and len(bias) == b.shape[1]:
            return linear(a, _k_last(b), bias.contiguous())
        return _scaled(bias, linear(a, _k_last(b)), beta, alpha)

    def _bmm(self, a, b):
        if not _held(a, b):
            return self._theirs["bmm"](a, b)
        from sgl_det.kernels.bmm import bmm

        return bmm(a, b)

    def _baddbmm(self, bias, a, b, *, beta=1, alpha=1):
        if not _held(a, b, bias):
            return self._theirs["baddbmm"](bias, a, b, beta=beta, alpha=alpha)
        return _scaled(bias, self._bmm(a, b), beta, alpha)

    def _mv(self, a, x):
        if not _held(a, x):
            return self._theirs["mv"](a, x)
        return linear(a, x[None, :].contiguous())[:, 0]

    def _addmv(self, bias, a, x, *, beta=1, alpha=1):
        if not _held(a, x, bias):
            return self._theirs["addmv"](bias, a, x, beta=beta, alpha=alpha)
        return _scaled(bias, self._mv(a, x), beta, alpha)


def _held(*tensors: torch.Tensor) -> bool:
    return tensors[0].dtype in DTYPES and len({t.dtype for t in tensors}) == 1


def _k_last(b: torch.Tensor) -> torch.Tensor:
    """[K, N] as a weight [N, K] with stride 1 along K: a view where b is one, else a copy."""
    weight = b.t()
    return weight if weight.stride(1) == 1 else weight.contiguous()


def _scaled(bias, product, beta, alpha):
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (bias if beta == 1 else bias * beta)


def _write(function, *args, out: torch.Tensor, **kwargs) -> torch.Tensor:
    value = function(*args, **kwargs)
    if out.shape != value.shape:
        out.resize_(value.shape)
    return out.copy_(value)


def _update(function, target: torch.Tensor, *args, **kwargs) -> torch.Tensor:
    return target.copy_(function(target, *args, **kwargs))
