"""Two reports of equal key: do two servers, or one before and after a restart, give equal bits?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sgl_det.axis import Axis
from sgl_det.probe.client import ProbeError
from sgl_det.probe.compare import Answer
from sgl_det.probe.table import AxisResult, Tally


def load(path: str | Path) -> dict[str, Any]:
    """A report written with --json; ProbeError when the file holds none."""
    try:
        report = json.loads(Path(path).read_text())
    except OSError as e:
        raise ProbeError(f"cannot read {path}: {e.strerror}") from None
    except ValueError:
        raise ProbeError(f"{path} is not JSON; give a file written by --json") from None
    if not isinstance(report, dict) or not isinstance(report.get("answers"), dict):
        raise ProbeError(f"{path} holds no probe report; give a file written by --json")
    return report


def compare_reports(a: dict[str, Any], b: dict[str, Any]) -> AxisResult:
    """The restart axis, from the oracles that two reports share.

    Raises ProbeError, "not comparable", unless both have the same numerics key and a prompt in
    common: equal bits are promised inside one key and nowhere else.
    """
    keys = a.get("key"), b.get("key")
    if None in keys or "" in keys or keys[0] != keys[1]:
        raise ProbeError(
            f"not comparable: the numerics keys are {keys[0] or 'none'} and {keys[1] or 'none'}; "
            f"equal bits are promised for equal keys only"
        )
    tally = Tally(Axis.RESTART)
    for name, expected in a["answers"].items():
        actual = b["answers"].get(name)
        if actual is not None and actual["prompt"] == expected["prompt"]:
            tally.see("second report", name, _answer(expected), _answer(actual))
    if not tally.requests:
        raise ProbeError(
            "not comparable: the reports have no prompt in common; probe both servers with the "
            "same --seed and limits"
        )
    tally.cases = 1
    return tally.result(frozenset({str(Axis.RESTART)}), driven=True, reason="")


def _answer(entry: dict[str, Any]) -> Answer:
    return Answer(tuple(entry["tokens"]), tuple(entry["logprobs"]))
