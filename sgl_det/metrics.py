"""Prometheus series beside SGLang's own on ``/metrics``, with ``--enable-metrics``.

SGLang's processes write theirs to files that one of them reads, and so do ours: what a worker
knows is told by the worker, the judgement by the launcher. A series cannot be withdrawn in this
mode, so one that no longer holds (an old key) falls to 0.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

_MODE = {"multiprocess_mode": "mostrecent"}


@functools.cache
def _gauge(name: str, text: str, *labels: str) -> Any:
    from prometheus_client import Gauge

    return Gauge(name, text, labels, **_MODE)


@functools.cache
def _counter(name: str, text: str) -> Any:
    from prometheus_client import Counter

    return Counter(name, text)


@functools.cache
def _seen(name: str) -> dict[Any, Any]:
    return {}


def _replace(gauge: Any, name: str, now: dict[tuple[str, ...], float]) -> None:
    """Set the labelled series of a gauge; those of before that are not among them become 0."""
    before = _seen(name)
    for labels in before.keys() - now.keys():
        gauge.labels(*labels).set(0)
    for labels, value in now.items():
        gauge.labels(*labels).set(value)
    before.update(now)


def _count(counter: Any, name: str, total: int) -> None:
    counter.inc(total - _seen(name).get("total", 0))
    _seen(name)["total"] = total


def of_worker(report: dict[str, Any]) -> None:
    """The series of a scheduler process, from ``worker.describe``'s report."""
    numerics, kernels = report["numerics"], report["kernels"]
    info = _gauge("sgl_det_info", "1 for the numerics key that holds", *_INFO)
    labels = (report["key"], *(str(numerics[name]) for name in _INFO[1:]))
    _replace(info, "info", {labels: 1})
    seconds = _gauge("sgl_det_self_test_seconds", "seconds that the proofs at start-up took")
    seconds.set(kernels.get("seconds", 0.0))
    chosen = _gauge("sgl_det_kernel_info", "1 for the kernel that serves", *_KERNEL)
    _replace(chosen, "kernel", dict.fromkeys(kernels_chosen(kernels), 1))
    of_canary(kernels)


def of_canary(kernels: dict[str, Any]) -> None:
    """The counts of the proofs that are repeated while serving."""
    counts = kernels.get("canary", {"cases": 0, "mismatches": 0, "watched": 0})
    runs = _counter("sgl_det_canary_runs", "proofs repeated in the idle server")
    _count(runs, "runs", counts["cases"])
    mismatches = _counter("sgl_det_canary_mismatches", "of them, those with other bits")
    _count(mismatches, "mismatches", counts["mismatches"])
    watched = _gauge("sgl_det_canary_watched", "proofs that are repeated in turn")
    watched.set(counts["watched"])


_INFO = ("key", "backend", "sgl_det", "sglang", "dtype")
_KERNEL = ("layer", "rows", "kernel")


def kernels_chosen(kernels: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Layer class, largest number of rows or "any", and kernel, from the proofs of a worker."""
    for layer, report in kernels.get("linear", {}).items():
        for bucket in report["buckets"]:
            yield f"linear {layer}", str(bucket["rows"]), bucket["kernel"]
    for operator, kernel in kernels.get("rows", {}).items():
        yield operator, "any", kernel.partition(",")[0]
    cpu = kernels.get("cpu", {})
    for layer in cpu.get("linear", ()):
        yield f"linear {layer}", "any", f"sgl_det C, {cpu['instruction_set']}"


def of_launcher(answer: dict[str, Any]) -> None:
    """The series of the process that serves HTTP, from the answer to GET /determinism."""
    claimed = _gauge("sgl_det_claimed", "1 for an axis that is claimed", "axis")
    axes = {(a,): 0 for a in answer["not_claimed"]} | {(a,): 1 for a in answer["claims"]}
    _replace(claimed, "claimed", axes)
    lifted = _gauge("sgl_det_refusals_lifted", "refusals lifted by --det-allow")
    lifted.set(len(answer["lifted"]))
    names = _gauge("sgl_det_refusal_lifted", "1 for a refusal lifted by --det-allow", "name")
    _replace(names, "lifted", {(name,): 1 for name in answer["lifted"]})
    of_problem(answer["problem"])


def of_problem(problem: str | None) -> None:
    """Whether a patch or proof is known not to hold: by the launcher's last look, or the canary."""
    held = _gauge("sgl_det_problem", "1 where a patch or proof no longer holds")
    held.set(int(bool(problem)))
