"""The determinism verdict of each arm: a short probe of all servers at the same time."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from sgl_det.probe import ProbeError, Report, run_probe

AXES = ("run_to_run", "batch_size", "batch_composition", "chunked_prefill")
BITWISE, DIVERGED, NOT_TESTED = "bitwise", "diverged", "not tested"


def of_report(report: Report) -> str:
    """bitwise, diverged or not tested."""
    if any(r.failed and r.mismatches for r in report.rows):
        return DIVERGED
    return BITWISE if report.passed else NOT_TESTED


def verdicts(urls: Mapping[str, str], seconds: float) -> tuple[dict[str, str], dict[str, str]]:
    """(verdict, details for people) of each arm; a probe that breaks off tested nothing."""

    def one(url: str) -> tuple[str, str]:
        try:
            report = run_probe(url, quick=True, axes=AXES, progress=False, limit_s=seconds)
        except ProbeError as error:
            return NOT_TESTED, str(error)
        return of_report(report), report.summary()

    with ThreadPoolExecutor(len(urls)) as pool:
        found = dict(zip(urls, pool.map(one, urls.values()), strict=True))
    return {a: v for a, (v, _) in found.items()}, {a: text for a, (_, text) in found.items()}
