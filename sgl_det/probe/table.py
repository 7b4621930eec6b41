"""The report of a probe: one row for each axis, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sgl_det.axis import Axis
from sgl_det.probe.compare import Answer, Divergence, compare

BITWISE, DIVERGED = "bitwise", "diverged"
NOT_TESTED, NOT_CLAIMED = "not tested", "not claimed"


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisResult:
    """What happened on one axis. unique_* count the answers of the axis's most divided prompt."""

    axis: str
    verdict: str
    claimed: bool | None = None  # None: the server makes no claims
    driven: bool = False  # whether this run was to test the axis
    excused: bool = False  # not tested because the server's configuration leaves nothing to vary
    cases: int = 0
    requests: int = 0
    mismatches: int = 0
    unique_tokens: int = 0
    unique_logprobs: int = 0
    seconds: float = 0.0
    first: Divergence | None = None
    note: str = ""

    @property
    def failed(self) -> bool:
        """Whether the axis fails the probe: it diverged, or is claimed and could not be tested."""
        if self.claimed is False or not self.driven:
            return False
        if self.verdict == DIVERGED:
            return True
        return bool(self.claimed) and self.verdict == NOT_TESTED and not self.excused

    def to_json(self) -> dict[str, Any]:
        names = ("axis", "verdict", "claimed", "cases", "requests", "mismatches")
        row = {
            n: getattr(self, n)
            for n in (*names, "unique_tokens", "unique_logprobs", "seconds", "note")
        }
        return row | {"first": self.first.to_json() if self.first else None}


def verdict(requests: int, mismatches: int, claimed: bool | None) -> str:
    """An axis's verdict. Zero requests are never a pass; one mismatch is always a divergence."""
    if mismatches:
        return DIVERGED
    if requests:
        return BITWISE
    return NOT_CLAIMED if claimed is False else NOT_TESTED


@dataclass(slots=True)
class Distinct:
    """The distinct answers of each prompt."""

    tokens: dict[str, set] = field(default_factory=dict)
    logprobs: dict[str, set] = field(default_factory=dict)
    answers: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, answer: Answer, *, count: bool = True) -> None:
        self.tokens.setdefault(name, set()).add(answer.tokens)
        if answer.logprobs is not None:
            self.logprobs.setdefault(name, set()).add(answer.logprobs)
        self.answers[name] = self.answers.get(name, 0) + count

    def merge(self, other: Distinct) -> None:
        for mine, theirs in ((self.tokens, other.tokens), (self.logprobs, other.logprobs)):
            for name, found in theirs.items():
                mine.setdefault(name, set()).update(found)
        for name, n in other.answers.items():
            self.answers[name] = self.answers.get(name, 0) + n

    def worst(self) -> tuple[int, int]:
        """The most distinct token lists, and logprob vectors, that any one prompt has."""
        sets = (self.tokens, self.logprobs)
        return tuple(max((len(s) for s in d.values()), default=0) for d in sets)


class Tally:
    """Collects one axis's answers."""

    def __init__(self, axis: Axis):
        self.axis, self.distinct, self.first, self.note = axis, Distinct(), None, ""
        self.cases = self.requests = self.mismatches = 0
        self.excused, self.seconds = False, 0.0

    def see(self, case: str, request: str, expected: Answer, actual: Answer) -> None:
        self.requests += 1
        self.distinct.add(request, expected, count=False)
        self.distinct.add(request, actual)
        found = compare(expected, actual, axis=str(self.axis), case=case, request=request)
        self.mismatches += found is not None
        self.first = self.first or found

    def result(self, claims: frozenset[str] | None, *, driven: bool, reason: str) -> AxisResult:
        """The row; reason is what the server says about an axis that it does not claim."""
        claimed = None if claims is None else self.axis in claims
        tokens, logprobs = self.distinct.worst()
        return AxisResult(
            axis=str(self.axis),
            verdict=verdict(self.requests, self.mismatches, claimed),
            claimed=claimed,
            driven=driven,
            excused=self.excused,
            cases=self.cases,
            requests=self.requests,
            mismatches=self.mismatches,
            unique_tokens=tokens,
            unique_logprobs=logprobs,
            seconds=round(self.seconds, 2),
            first=self.first,
            note=self.note or ("" if claimed else reason),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A probe's outcome.

    answers: the oracles, {prompt name: {prompt: digest, tokens, logprobs}}.
    subject: one fixed prompt over all its conditions, {conditions, unique_tokens, unique_logprobs}.
    total: all prompts, {prompts, answers, unique_tokens, unique_logprobs}; ideal is one a prompt.
    """

    url: str
    key: str | None
    seed: int
    quick: bool
    seconds: float
    server: dict[str, Any]
    rows: tuple[AxisResult, ...]
    answers: dict[str, dict[str, Any]]
    subject: dict[str, int]
    total: dict[str, int]

    @property
    def passed(self) -> bool:
        """Every claimed axis was bitwise: one at least, and none failed.

        A server without claims is held to every axis that was tested.
        """
        counted = [r for r in self.rows if r.driven and r.claimed is not False]
        return any(r.verdict == BITWISE for r in counted) and not any(r.failed for r in counted)

    def row(self, axis: str) -> AxisResult:
        return next(r for r in self.rows if r.axis == axis)

    def to_json(self) -> dict[str, Any]:
        names = ("key", "url", "seed", "quick", "seconds", "server", "subject", "total")
        head = {n: getattr(self, n) for n in names} | {"passed": self.passed}
        return head | {"rows": [r.to_json() for r in self.rows], "answers": self.answers}

    def table(self) -> str:
        """The report for people: header with the key, one table, the first divergences, counts."""
        s = self.server
        about = [f"key {self.key or 'none'}", f"backend {s.get('backend')}"]
        about += [f"sglang {s.get('sglang')}", self.url]
        columns = (
            "axis",
            "claimed",
            "verdict",
            "cases",
            "requests",
            "mismatches",
            "unique",
            "note",
        )
        lines = [_cells(r) for r in self.rows]
        out = ["sgl-det probe · " + " · ".join(about), "", *format_table(columns, lines)]
        diverged = [r.first for r in self.rows if r.first]
        if diverged:
            out += ["", "first divergence on each axis (logprobs as hex floats):"]
            out += [f"  {d}" for d in diverged]
        return "\n".join([*out, "", self.summary()])

    def summary(self) -> str:
        """One line with the counts."""
        by = {v: sum(r.verdict == v for r in self.rows) for v in (BITWISE, DIVERGED)}
        failed = [r.axis for r in self.rows if r.failed]
        sub, total = self.subject, self.total
        return (
            f"{'PASSED' if self.passed else 'FAILED'}: {by[BITWISE]} axes bitwise, "
            f"{by[DIVERGED]} diverged{f' (failed: {chr(44).join(failed)})' if failed else ''}; "
            f"one prompt under {sub['conditions']} conditions: {sub['unique_tokens']} distinct "
            f"completions, {sub['unique_logprobs']} distinct logprob vectors; "
            f"{total['answers']} answers to {total['prompts']} prompts: {total['unique_tokens']} "
            f"and {total['unique_logprobs']} distinct; {self.seconds:.0f} s"
        )


def format_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Aligned text lines, header and rule first."""
    grid = [list(columns), *(list(r) for r in rows)]
    widths = [max(len(r[i]) for r in grid) for i in range(len(grid[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in grid]
    return [lines[0], "  ".join("-" * w for w in widths[:-1]) + "  ----", *lines[1:]]


def _cells(row: AxisResult) -> list[str]:
    claimed = {None: "-", True: "yes", False: "no"}[row.claimed]
    unique = f"{row.unique_tokens} / {row.unique_logprobs}" if row.requests else "-"
    counts = [str(n) if row.requests else "-" for n in (row.cases, row.requests, row.mismatches)]
    return [row.axis, claimed, row.verdict, *counts, unique, row.note]
