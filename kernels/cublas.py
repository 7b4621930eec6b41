"""PyTorch's own matrix products on the GPU, below our overrides, with split-K forbidden.

Split-K is the only thing by which cuBLAS leaves the canonical order on the GPUs seen so far; which
of its kernels keep it is proven, not assumed (`linear_proof`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_REDUCTIONS = (
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
)


@contextmanager
def no_split_k() -> Iterator[None]:
    """cuBLASLt, never with split-K, for the 16-bit products inside the block.

    Source: PyTorch's ``torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction``.
    """
    undo = forbid_split_k()
    try:
        yield
    finally:
        undo()


def forbid_split_k():
    """Forbid it in this process from now on; returns the function that restores what was."""
    flags, library = torch.backends.cuda.matmul, torch.backends.cuda.preferred_blas_library
    before = library()
    reductions = {f: (getattr(flags, f), getattr(flags, f"{f}_split_k")) for f in _REDUCTIONS}

    def undo() -> None:
        library(before)
        for name, value in reductions.items():
            setattr(flags, name, value)

    library("cublaslt")
    for name in _REDUCTIONS:
        setattr(flags, name, (False, False))
    return undo


@functools.cache
def original(name: str, key: str = "CUDA"):
    """PyTorch's kernel for an operator: first asked for before anything overrides it."""
    kernel = torch.library.get_kernel(f"aten::{name}", key)
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return functools.partial(kernel.call_boxed, keys)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [M, K], weight [N, K], bias [N] or None -> [M, N], by PyTorch's kernel."""
    if bias is None:
        return original("mm")(x, weight.t())
    return original("addmm")(bias, x, weight.t())
