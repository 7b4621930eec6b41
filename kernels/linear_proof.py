"""The proof that a kernel computes a linear layer in the canonical order, on this machine.

Bits are compared, on realistic operands and on operands whose exact sums are zero, for every number
of rows up to 300, for both sides of every bucket edge, with the rows first, in the middle and last
among more rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from sgl_det.kernels.linear_candidates import Candidate, Shape
from sgl_det.kernels.linear_data import KINDS, operands
from sgl_det.kernels.matmul import matmul

# A bucket holds the numbers of rows above the edge before it and up to its own.
EDGES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192)
DENSE = 300  # every number of rows up to here is tried
LARGEST_RESULT = 1 << 29  # bytes: the rows of a wide layer are bounded by it


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the proof of one candidate found; reason is empty where it is proven."""

    candidate: str
    cases: int
    reason: str = ""

    @property
    def proven(self) -> bool:
        return not self.reason


def edges(shape: Shape, most: int = EDGES[-1]) -> tuple[int, ...]:
    """The bucket edges of a layer: those whose result stays below `LARGEST_RESULT`."""
    bound = max(1, LARGEST_RESULT // (shape.n * shape.dtype.itemsize))
    return tuple(e for e in EDGES if e <= min(bound, most)) or EDGES[:1]


def rows_to_try(of: Sequence[int], dense: int = DENSE) -> tuple[int, ...]:
    """The numbers of rows of a proof over these bucket edges, ascending."""
    most = of[-1]
    near = {e + d for e in of for d in (-1, 0, 1)}
    return tuple(sorted(m for m in near | set(range(1, dense + 1)) if 1 <= m <= most))


def canonical(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The kernel whose bits every candidate must give."""
    return matmul(x, weight, bias)


def prove(
    shape: Shape,
    candidates: Iterable[Candidate],
    *,
    bucket_edges: Sequence[int],
    device: str = "cuda",
    dense: int = DENSE,
    reference=canonical,
) -> list[Verdict]:
    """One verdict a candidate, over the numbers of rows for which it is offered."""
    rows, found = rows_to_try(bucket_edges, dense), {c: [0, ""] for c in candidates}
    for kind in KINDS:
        x, weight, bias = operands(kind, shape, rows[-1], device)
        expected = _bits(reference(x, weight, bias))
        for candidate, state in found.items():
            if state[1]:
                continue
            tried = [m for m in rows if candidate.offered(m)]
            cases = [(m, at) for m in tried for at in _places(m, rows[-1], bucket_edges)]
            state[0] += len(cases)
            state[1] = _first_mismatch(candidate, cases, (x, weight, bias), expected, kind)
    return [
        Verdict(candidate=c.name, cases=cases, reason=reason or ("" if cases else "not offered"))
        for c, (cases, reason) in found.items()
    ]


def _places(m: int, most: int, bucket_edges: Sequence[int]) -> tuple[int, ...]:
    """Where in the operands the m rows lie: first; near an edge also in the middle and last."""
    if not any(abs(m - e) <= 1 for e in bucket_edges):
        return (0,)
    return tuple(sorted({0, (most - m) // 2, most - m}))


def _first_mismatch(candidate: Candidate, cases, operands, expected, kind: str) -> str:
    x, weight, bias = operands
    bad = torch.zeros(len(cases), dtype=torch.int64, device=x.device)
    for i, (m, at) in enumerate(cases):
        try:
            y = candidate.run(x[at : at + m], weight, bias)
        except Exception as error:  # whatever a library raises, the kernel is not proven
            return f"{m} rows: {_one_line(error)}"
        bad[i] = (_bits(y) != expected[at : at + m]).sum()
    counts = bad.tolist()
    for (m, at), count in zip(cases, counts, strict=True):
        if count:
            total = m * len(weight)
            return f"{count} of {total} elements differ at {m} rows from row {at}, {kind} data"
    return ""


def _bits(y: torch.Tensor) -> torch.Tensor:
    return y.view({2: torch.int16, 4: torch.int32}[y.element_size()])


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def one_case(shape: Shape, candidate: Candidate, rows: int, device: str = "cuda") -> str:
    """One case of the proof, on cancelling data: what differs, or nothing."""
    data = operands("cancelling", shape, rows, device)
    return _first_mismatch(candidate, [(rows, 0)], data, _bits(canonical(*data)), "cancelling")
