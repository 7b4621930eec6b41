"""The kernels that may compute a linear layer, and for which shapes each is offered.

A candidate is only a proposal: `linear_proof` compares its bits with the canonical order, on the
GPU at hand, before it may serve.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from sgl_det.kernels import matmul_tma
from sgl_det.kernels.matmul import Tile, matmul

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
# Most rows a tile is offered for, and the tiles: more rows than a tile has read the weight again.
_SMALL = (
    (8, Tile(m=8, n=8, k=256, warps=1, stages=5)),
    (8, Tile(m=8, n=16, k=256, warps=2, stages=5)),
    (8, Tile(m=8, n=32, k=256, stages=4)),
    (8, Tile(m=8, n=64, k=128, stages=5)),
    (16, Tile(m=16, n=8, k=256, warps=1, stages=5)),
    (16, Tile(m=16, n=16, k=256, warps=2, stages=5)),
    (16, Tile(m=16, n=32, k=256, stages=4)),
    (16, Tile(m=16, n=64, k=128, stages=5)),
    (16, Tile(m=16, n=128, k=128, stages=4)),
    (32, Tile(m=32, n=16, k=256, warps=2, stages=4)),
    (32, Tile(m=32, n=32, k=256, stages=4)),
    (32, Tile(m=32, n=64, k=128, stages=5)),
    (64, Tile(m=64, n=32, k=128, stages=5)),
    (64, Tile(m=64, n=64, k=128, stages=4)),
    (128, Tile(m=64, n=64, k=64, stages=5)),
    (256, Tile(m=64, n=128, k=64, stages=4)),
    (256, Tile(m=128, n=64, k=64, stages=4)),
)
_LARGE = Tile(m=128, n=128, k=64, warps=8, stages=3)
_FP32 = (Tile(m=16, n=64, k=32, stages=2), Tile(m=64, n=64, k=16), Tile(m=32, n=32, k=32))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A linear layer as a kernel sees it: weight [n, k] of dtype, with or without a bias."""

    n: int
    k: int
    dtype: torch.dtype
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A kernel: run(x [M, K], weight [N, K], bias [N] or None) -> [M, N].

    rows   fewest and most rows for which it is offered
    """

    name: str
    run: Run
    rows: tuple[int, int] = (1, 1 << 30)

    def offered(self, m: int) -> bool:
        """Whether it may be chosen for m rows."""
        return self.rows[0] <= m <= self.rows[1]


@contextmanager
def no_split_k() -> Iterator[None]:
    """cuBLASLt with split-K forbidden, for the products of 16 bits inside the block.

    Source: PyTorch's ``torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction``.
    """
    flags, library = torch.backends.cuda.matmul, torch.backends.cuda.preferred_blas_library
    before = library()
    reductions = {f: (getattr(flags, f), getattr(flags, f"{f}_split_k")) for f in _REDUCTIONS}
    library("cublaslt")
    for name in _REDUCTIONS:
        setattr(flags, name, (False, False))
    try:
        yield
    finally:
        library(before)
        for name, value in reductions.items():
            setattr(flags, name, value)


_REDUCTIONS = (
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
)


def candidates(shape: Shape) -> tuple[Candidate, ...]:
    """Every kernel that takes the shape on this GPU, in no particular order."""
    if shape.dtype == torch.float32:
        return tuple(_triton(tile, (1, 1 << 30)) for tile in _FP32)
    limit = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    small = [_triton(t, (t.m // 2 + 1 if t.m > 8 else 1, most)) for most, t in _SMALL]
    large = [_triton(_LARGE, (65, 1 << 30))]
    tiles = [c for c, t in zip(small, _SMALL, strict=True) if t[1].shared_bytes(2) <= limit]
    if torch.cuda.get_device_capability() >= (9, 0) and shape.n % 8 == 0 and shape.k % 8 == 0:
        large += [_tma(tile) for tile in matmul_tma.TILES]
    found = [Candidate(name="cublaslt", run=_cublaslt), *tiles, *large]
    if _deep_gemm() is not None and shape.dtype == torch.bfloat16 and not shape.bias:
        if shape.n % 16 == 0 and shape.k % 64 == 0:
            found.append(Candidate(name="deep_gemm", run=_run_deep_gemm))
    return tuple(found)


def _triton(tile: Tile, rows: tuple[int, int]) -> Candidate:
    def run(x, weight, bias):
        return matmul(x, weight, bias, tile=tile)

    return Candidate(name=tile.name, run=run, rows=rows)


def _tma(tile: Tile) -> Candidate:
    def run(x, weight, bias):
        return matmul_tma.matmul_tma(x, weight, bias, tile=tile)

    return Candidate(name=tile.name.replace("triton", "triton tma"), run=run, rows=(129, 1 << 30))


def _cublaslt(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    with no_split_k():
        return torch.nn.functional.linear(x, weight, bias)


@functools.cache
def _deep_gemm():
    try:
        import deep_gemm
    except ImportError:
        return None
    return deep_gemm if torch.cuda.get_device_capability()[0] in (9, 10) else None


def _run_deep_gemm(x: torch.Tensor, weight: torch.Tensor, bias: None) -> torch.Tensor:
    y = x.new_empty((len(x), len(weight)))
    _deep_gemm().bf16_gemm_nt(x, weight, y)
    return y
