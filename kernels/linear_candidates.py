"""The kernels that may compute a linear layer, and for which shapes each is offered.

A candidate is only a proposal: `linear_proof` compares its bits with the canonical order, on the
GPU at hand, before it may serve. cuBLASLt is one where split-K is forbidden: what PyTorch asks it
for (`cublas.no_split_k`), and for few rows its algorithms one by one (`cublaslt`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from triton.runtime.errors import TritonError

from sgl_det.kernels import cublas, cublaslt, matmul_tma
from sgl_det.kernels.matmul import CANONICAL, Tile, matmul

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
# Fewest and most rows for which a tile is offered: each row tile reads the weight again.
_SMALL = (
    (1, 8, Tile(m=8, n=16, k=256, warps=2, stages=5)),
    (1, 8, Tile(m=8, n=32, k=256, stages=4)),
    (1, 32, Tile(m=8, n=8, k=512, warps=1, stages=5)),
    (9, 48, Tile(m=16, n=16, k=256, warps=2, stages=5)),
    (9, 48, Tile(m=16, n=32, k=256, stages=4)),
    (9, 16, Tile(m=16, n=128, k=128, stages=4)),
    (17, 128, Tile(m=32, n=32, k=256, stages=4)),
    (17, 96, Tile(m=32, n=64, k=128, stages=5)),
    (33, 192, Tile(m=64, n=32, k=128, stages=8)),
    (33, 256, Tile(m=64, n=64, k=128, stages=4)),
    (33, 256, Tile(m=64, n=128, k=64, stages=4)),
    (65, 256, Tile(m=128, n=64, k=64, stages=4)),
)
_LARGE = Tile(m=128, n=128, k=64, warps=8, stages=3)
_NARROW_ROWS, _LARGE_ROWS = (17, 256), (129, 1 << 30)
# cuBLASLt is asked for algorithms at these numbers of rows; each is offered up to the last.
_ASKED = (1, 8, 16, 32, 64, 96, 128, 192, 256, 512)
# What a kernel that does not hold a shape raises, in PyTorch, Triton, cuBLASLt or DeepGEMM.
RAISED = (RuntimeError, ValueError, TypeError, ArithmeticError, TritonError)
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


def candidates(shape: Shape, *, deep_gemm: bool = False) -> tuple[Candidate, ...]:
    """Every kernel that takes the shape on this GPU, in no particular order.

    DeepGEMM compiles a kernel for each shape and number of rows, so it is offered when asked for.
    """
    if shape.dtype == torch.float32:
        return tuple(_triton(tile, (1, 1 << 30)) for tile in _FP32)
    limit = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    tiles = [_triton(t, (least, most)) for least, most, t in _SMALL if t.shared_bytes(2) <= limit]
    large = [_triton(_LARGE, (65, 1 << 30))] if _LARGE.shared_bytes(2) <= limit else []
    large.append(_triton(CANONICAL[2], (1, 1 << 30)))
    if torch.cuda.get_device_capability() >= (9, 0) and shape.n % 8 == 0 and shape.k % 8 == 0:
        large += [
            _tma(tile, rows)
            for rows, of in ((_NARROW_ROWS, matmul_tma.NARROW), (_LARGE_ROWS, matmul_tma.TILES))
            for tile in of
            if matmul_tma.shared_bytes(tile) <= limit
        ]
    asked = cublaslt.algorithms(shape.n, shape.k, shape.dtype, shape.bias, _ASKED)
    algorithms = [Candidate(name=a.name, run=a, rows=(1, _ASKED[-1])) for a in asked]
    found = [Candidate(name="cublaslt", run=cublas.linear), *algorithms, *tiles, *large]
    if deep_gemm and _deep_gemm() is not None and shape.dtype == torch.bfloat16 and not shape.bias:
        if shape.n % 16 == 0 and shape.k % 64 == 0:
            found.append(Candidate(name="deep_gemm", run=_run_deep_gemm))
    return tuple(found)


def _triton(tile: Tile, rows: tuple[int, int]) -> Candidate:
    def run(x, weight, bias):
        return matmul(x, weight, bias, tile=tile)

    return Candidate(name=tile.name, run=run, rows=rows)


def _tma(tile: Tile, rows: tuple[int, int]) -> Candidate:
    def run(x, weight, bias):
        return matmul_tma.matmul_tma(x, weight, bias, tile=tile)

    return Candidate(name=tile.name.replace("triton", "triton tma"), run=run, rows=rows)


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
