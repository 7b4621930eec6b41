"""The audit's outcome: one row for each kernel, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sgl_det.audit.kernels_seen import Seen
from sgl_det.audit.rules import Kind, Rules, Verdict
from sgl_det.probe.table import format_table

SCHEMA = 1
_WIDTH = 84
_COLUMNS = ("class", "calls", "in graphs", "us", "rule", "kernel")


@dataclass(frozen=True, slots=True)
class Report:
    """Kernels with their verdicts, the unknown ones first.

    rows   (kernel, verdict)
    about  what was audited: key, backend, model, requests
    """

    rows: tuple[tuple[Seen, Verdict], ...]
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def unknown(self) -> tuple[tuple[Seen, Verdict], ...]:
        return tuple((s, v) for s, v in self.rows if v.kind is Kind.UNKNOWN)

    @property
    def problems(self) -> list[str]:
        """A sentence for each reason to fail; empty means that the audit passed."""
        if not self.rows:
            return [
                "the trace holds no GPU kernel; see the server's log for what the profiler says"
            ]
        found = []
        if not any(seen.captured for seen, _ in self.rows):
            found.append(
                "no kernel of the trace was launched by a CUDA graph, so no captured decode step "
                "was seen; audit a server whose decode graphs are on"
            )
        if self.unknown:
            kernels = "kernel is" if len(self.unknown) == 1 else "kernels are"
            found.append(f"{len(self.unknown)} {kernels} not known to be invariant")
        return found

    @property
    def passed(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """{schema, passed, problems, about, kernels: [{name, class, rule, why, ...}]}"""
        return {
            "schema": SCHEMA,
            "passed": self.passed,
            "problems": self.problems,
            "about": dict(self.about),
            "kernels": [
                {
                    "name": seen.name,
                    "class": verdict.kind.value,
                    "rule": verdict.rule or None,
                    "why": verdict.why,
                    "source": verdict.source or None,
                    "calls": seen.calls,
                    "captured": seen.captured,
                    "total_us": seen.total_us,
                }
                for seen, verdict in self.rows
            ],
        }

    def text(self) -> str:
        """The table, the rules that it names, and for each unknown kernel the line to add."""
        about = " · ".join(f"{k} {v}" for k, v in self.about.items() if not isinstance(v, dict))
        lines = [f"sgl_det: audit · {about}", ""]
        lines += format_table(_COLUMNS, [_cells(s, v) for s, v in self.rows])
        used = {v.rule: v for _, v in self.rows if v.rule}
        lines += ["", "rules:", *(f"  {r}: {v.why} ({v.source})" for r, v in sorted(used.items()))]
        if self.unknown:
            lines += ["", "unknown (to accept one, read its source and complete the line):"]
            lines += [
                x for s, v in self.unknown for x in (f"  {v.why}", f"    {rule_line(s.name)}")
            ]
            lines += ["  in sgl_det/audit/rules_data/added.toml"]
        by = {kind: sum(v.kind is kind for _, v in self.rows) for kind in Kind}
        counts = ", ".join(f"{n} {kind.value}" for kind, n in by.items())
        return "\n".join([*lines, "", f"{self._outcome()}: {counts}"])

    def _outcome(self) -> str:
        return "PASSED" if self.passed else f"FAILED ({'; '.join(self.problems)})"


def judge(
    seen: Sequence[Seen], rules: Rules, report: Mapping[str, Any], about: Mapping[str, Any]
) -> Report:
    """The audit of what a trace holds.

    report   the server's answer to GET /determinism: its start-up proofs, and what it is
    about    what else the header shall tell
    """
    proofs = report.get("kernels") or {}
    rows = [(s, rules.judge(s.name, proofs)) for s in seen]
    rows.sort(key=lambda row: row[1].kind is not Kind.UNKNOWN)
    numerics = report.get("numerics") or {}
    what = {"key": report.get("key"), "backend": report.get("backend")}
    return Report(tuple(rows), {**what, "gpu": numerics.get("gpu"), **about, "numerics": numerics})


def rule_line(name: str) -> str:
    """The line of ``added.toml`` that would accept a kernel, once its blanks are filled in."""
    quoted = json.dumps(name) if "'" in name else f"'{name}'"
    return f"{{ id = '', class = '', why = '', source = '', names = [{quoted}] }},"


def _cells(seen: Seen, verdict: Verdict) -> list[str]:
    name = seen.name if len(seen.name) <= _WIDTH else f"{seen.name[: _WIDTH - 3]}..."
    numbers = [str(seen.calls), str(seen.captured), f"{seen.total_us:.0f}"]
    return [verdict.kind.value, *numbers, verdict.rule or "-", name]
