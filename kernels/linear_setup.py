"""From the layers of a model to plans: read what was proven before, or prove and time it now."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sgl_det.kernels import cublas, linear_proof
from sgl_det.kernels.linear import Plan, plan
from sgl_det.kernels.linear_candidates import Candidate, Shape, candidates
from sgl_det.kernels.linear_proof import Verdict
from sgl_det.kernels.linear_timing import Timer
from sgl_det.kernels.proof_cache import ProofCache


class Unproven(RuntimeError):
    """No kernel gives the canonical bits for a layer; the message says which, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer's plan, and the report of how it came about."""

    plan: Plan
    report: dict[str, Any]


def set_up(
    shapes: Iterable[Shape],
    *,
    cache: ProofCache | None,
    most_rows: int,
    only: str = "",
    progress: Callable[[str], None] = lambda text: None,
) -> dict[Shape, Layer]:
    """Plans for the shapes, each by the fastest proven kernels. Raises Unproven.

    most_rows   rows of the largest batch
    only        serve by candidates whose name begins so, where they are proven
    progress    called before each layer with what is done
    """
    found = {}
    for shape in shapes:
        progress(f"linear {shape.n}x{shape.k}")
        found[shape] = _layer(shape, cache, most_rows, only)
    return found


def _layer(shape: Shape, cache: ProofCache | None, most_rows: int, only: str) -> Layer:
    known = candidates(shape, deep_gemm=only.startswith("deep"))
    bucket_edges = linear_proof.edges(shape, most_rows)
    key = {**asdict(shape), "dtype": str(shape.dtype), "edges": list(bucket_edges), "only": only}
    kept = cache.read(key) if cache else None
    # cuBLASLt names its algorithms anew at every start.
    if kept is None or not {b["kernel"] for b in kept["buckets"]} <= {c.name for c in known}:
        kept = _prove_and_time(shape, known, bucket_edges, only)
        if cache:
            cache.write(key, kept)
    else:
        _check_again(shape, known, kept)
    chosen = plan(bucket_edges, [b["kernel"] for b in kept["buckets"]], known)
    return Layer(plan=chosen, report=kept)


def _prove_and_time(shape: Shape, known, bucket_edges, only: str) -> dict[str, Any]:
    start = time.monotonic()
    offered = {e: [c for c in known if c.offered(e) and c.offered(_least(e))] for e in bucket_edges}
    with cublas.no_split_k():
        timer = Timer(shape, bucket_edges[-1])
        verdicts = _prove_the_fast(shape, offered, only, timer)
        buckets = [_bucket(shape, edge, offered[edge], only, timer, verdicts) for edge in offered]
    del timer
    torch.cuda.empty_cache()
    proven: dict[str, list[int]] = {}
    for v in verdicts:
        if v.rows:
            proven[v.candidate] = sorted([*proven.get(v.candidate, ()), *v.rows])
    return {
        "proven": proven,
        "rejected": {v.candidate: v.reason for v in verdicts if not v.proven},
        "cases": sum(v.cases for v in verdicts),
        "buckets": buckets,
        "seconds": round(time.monotonic() - start, 2),
    }


def _prove_the_fast(shape: Shape, offered, only: str, timer: Timer) -> list[Verdict]:
    """Proofs of the kernels that are fast in a bucket; where none of them holds, of all others."""
    fast = {e: timer.shortlist(_forced(some, only) or some, e) for e, some in offered.items()}
    verdicts = _prove(shape, fast, tuple(offered))
    unproven = [e for e in offered if not any(e in v.rows for v in verdicts)]
    others = {e: [c for c in offered[e] if c not in fast[e]] for e in unproven}
    return verdicts + _prove(shape, others, tuple(offered))


def _prove(shape: Shape, of: dict[int, list[Candidate]], bucket_edges) -> list[Verdict]:
    """Proofs of the candidates of some buckets, one verdict a candidate."""
    wanted: dict[Candidate, set[int]] = {}
    for edge, some in of.items():
        for candidate in some:
            wanted.setdefault(candidate, set()).add(edge)
    if not wanted:
        return []
    return linear_proof.prove(shape, wanted, bucket_edges=bucket_edges, wanted=wanted)


def _forced(candidates: list[Candidate], only: str) -> list[Candidate]:
    return [c for c in candidates if c.name.startswith(only)]


def _bucket(shape: Shape, edge: int, offered, only: str, timer, verdicts) -> dict[str, Any]:
    proven = {v.candidate for v in verdicts if edge in v.rows}
    good = [c for c in offered if c.name in proven]
    if not good:
        reasons = "; ".join(f"{v.candidate}: {v.reason}" for v in verdicts if v.reason)
        raise Unproven(
            f"no kernel is proven for the linear layer {shape.n}x{shape.k} ({shape.dtype}) at "
            f"{edge} rows, expected one with the canonical bits ({reasons or 'none is offered'})"
        )
    name, us = timer.fastest(_forced(good, only) or good, edge)
    return {"rows": edge, "kernel": name, "us": round(us, 2)}


def _least(edge: int) -> int:
    """The fewest rows of the bucket that ends at an edge."""
    at = linear_proof.EDGES.index(edge)
    return linear_proof.EDGES[at - 1] + 1 if at else 1


def _check_again(shape: Shape, known, kept: dict[str, Any]) -> None:
    """One proof case for each kernel that serves: a kept proof must still be true."""
    serving = {b["kernel"]: b["rows"] for b in kept["buckets"]}
    used = [c for c in known if c.name in serving]
    with cublas.no_split_k():
        for candidate in used:
            rows = serving[candidate.name]
            verdict = linear_proof.one_case(shape, candidate, rows)
            if verdict:
                raise Unproven(
                    f"{candidate.name} was proven for the linear layer {shape.n}x{shape.k} and "
                    f"now differs ({verdict}); remove the proof cache and look at the GPU"
                )
    torch.cuda.empty_cache()
