"""The proof that a kernel computes a linear layer in the canonical order, on this machine.

Bits are compared on realistic operands and on operands whose exact sums are zero, for every number
of rows up to 300, for both sides of every bucket edge and some numbers between, with the rows
first, in the middle and last among more. A kernel serves the buckets in which nothing differed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from sgl_det.kernels.linear_candidates import RAISED, Candidate, Shape
from sgl_det.kernels.linear_data import KINDS, operands
from sgl_det.kernels.matmul import matmul

# A bucket holds the numbers of rows above the edge before it and up to its own.
EDGES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192)
DENSE = 300  # every number of rows up to here is tried
BETWEEN = 7  # and beyond, one fewer than this inside each bucket
LARGEST_RESULT = 1 << 29  # bytes: the rows of a wide layer are bounded by it


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the proof of one candidate found.

    rows     the bucket edges up to which it is proven
    reason   the first difference, or empty where it is proven wherever it is offered
    """

    candidate: str
    cases: int
    rows: tuple[int, ...] = ()
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
    between = {a + (b - a) * i // BETWEEN for a, b in pairwise(of) for i in range(1, BETWEEN)}
    tried = near | between | set(range(1, dense + 1))
    return tuple(sorted(m for m in tried if 1 <= m <= most))


def canonical(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The kernel whose bits every candidate must give."""
    return matmul(x, weight, bias)


def prove(
    shape: Shape,
    candidates: Iterable[Candidate],
    *,
    bucket_edges: Sequence[int],
    wanted: Mapping[Candidate, Container[int]] | None = None,
    device: str = "cuda",
    dense: int = DENSE,
    reference=canonical,
) -> list[Verdict]:
    """One verdict a candidate, over the numbers of rows for which it is offered.

    wanted   for each candidate the edges of the buckets in which to prove it; all by default
    """
    rows, known = rows_to_try(bucket_edges, dense), tuple(candidates)
    asked = wanted or dict.fromkeys(known, bucket_edges)
    cases = {c: _cases(c, rows, bucket_edges, asked[c]) for c in known}
    found: dict[Candidate, dict[int, str]] = {c: {} for c in known}
    for kind in KINDS:
        data = operands(kind, shape, rows[-1], device)
        expected = _bits(reference(*data))
        for candidate, bad in found.items():
            left = [c for c in cases[candidate] if _bucket(c[0], bucket_edges) not in bad]
            bad |= _mismatches(candidate, left, data, expected, kind, bucket_edges) | bad
    return [_verdict(c, cases[c], found[c], bucket_edges) for c in known]


def _cases(candidate: Candidate, rows, bucket_edges, wanted) -> list[tuple[int, int]]:
    """(number of rows, where they begin) of every case."""
    tried = [m for m in rows if candidate.offered(m) and _bucket(m, bucket_edges) in wanted]
    return [(m, at) for m in tried for at in _places(m, rows[-1], bucket_edges)]


def _verdict(candidate: Candidate, cases, bad: dict[int, str], bucket_edges) -> Verdict:
    tried = {_bucket(m, bucket_edges) for m, _ in cases}
    first = bad[min(bad)] if bad else "" if cases else "not offered"
    good = tuple(sorted(tried - bad.keys()))
    return Verdict(candidate=candidate.name, cases=len(cases), rows=good, reason=first)


def _bucket(m: int, bucket_edges: Sequence[int]) -> int:
    return bucket_edges[bisect_left(bucket_edges, m)]


def _places(m: int, most: int, bucket_edges: Sequence[int]) -> tuple[int, ...]:
    """Where in the operands the m rows lie: first; near an edge also in the middle and last."""
    if not any(abs(m - e) <= 1 for e in bucket_edges):
        return (0,)
    return tuple(sorted({0, (most - m) // 2, most - m}))


def _mismatches(
    candidate: Candidate, cases, data, expected, kind: str, bucket_edges
) -> dict[int, str]:
    """The first difference in each bucket that has one."""
    x, weight, bias = data
    bad = torch.zeros(len(cases), dtype=torch.int64, device=x.device)
    raised: dict[int, str] = {}
    for i, (m, at) in enumerate(cases):
        bucket = _bucket(m, bucket_edges)
        if bucket in raised:
            continue
        try:
            y = candidate.run(x[at : at + m], weight, bias)
        except RAISED as error:
            raised[bucket] = f"{m} rows: {_one_line(error)}"
            continue
        bad[i] = (_bits(y) != expected[at : at + m]).sum()
    found: dict[int, str] = {}
    for (m, at), count in zip(cases, bad.tolist(), strict=True):
        if count:
            total = m * len(weight)
            text = f"{count} of {total} elements differ at {m} rows from row {at}, {kind} data"
            found.setdefault(_bucket(m, bucket_edges), text)
    return found | raised


def _bits(y: torch.Tensor) -> torch.Tensor:
    return y.view({2: torch.int16, 4: torch.int32}[y.element_size()])


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def one_case(shape: Shape, candidate: Candidate, rows: int, device: str = "cuda") -> str:
    """One case of the proof, on cancelling data: what differs, or nothing.

    Raises torch.OutOfMemoryError, which says nothing of the kernel.
    """
    x, weight, bias = operands("cancelling", shape, rows, device)
    expected = _bits(canonical(x, weight, bias))
    try:
        y = candidate.run(x, weight, bias)
    except torch.OutOfMemoryError:
        raise
    except RAISED as error:
        return f"{rows} rows: {_one_line(error)}"
    count = int((_bits(y) != expected).sum())
    differing = f"{count} of {y.numel()} elements differ at {rows} rows, cancelling data"
    return differing if count else ""
