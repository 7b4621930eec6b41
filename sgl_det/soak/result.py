"""Counts of a soak while it runs, and its result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sgl_det.probe.table import format_table
from sgl_det.soak.send import ABORT, ABORT_STREAM, DISCONNECT, LEAVE, Act, Book, Reply

BITWISE, DIVERGED, FAILED = "bitwise", "diverged", "server failed"


@dataclass(slots=True)
class Tally:
    """Counts. requests: answers compared whole; cut: those ended early, whose beginning was."""

    requests: Counter = field(default_factory=Counter)  # by kind
    tokens: Counter = field(default_factory=Counter)  # by kind, of answers compared whole
    cut: Counter = field(default_factory=Counter)  # by kind
    mismatches: Counter = field(default_factory=Counter)  # by kind
    ways: Counter = field(default_factory=Counter)
    phases: Counter = field(default_factory=Counter)
    flushes: int = 0
    flushes_refused: int = 0
    retractions: int = 0  # of the answers that came back with their number
    warm: int = 0  # answers that began on cached tokens
    most_at_once: int = 0

    def begun(self, act: Act, running: int) -> None:
        self.ways[act.way] += 1
        self.most_at_once = max(self.most_at_once, running)

    def saw(self, reply: Reply, book: Book) -> None:
        entry = book[reply.name]
        kind = entry.item.kind
        if reply.cut:
            self.cut[kind] += 1
        else:
            self.requests[kind] += 1
            self.tokens[kind] += len(entry.expected.get("tokens") or ())
        self.retractions += reply.meta.get("num_retractions") or 0
        self.warm += bool(reply.meta.get("cached_tokens"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of a soak. first: the first mismatch's record; failure: what the server did."""

    url: str
    key: str | None
    seed: int
    minutes: float
    seconds: float
    oracle: int
    server: dict[str, Any]
    tally: Tally
    kinds: Sequence[str]
    counted_retractions: int | None  # by /metrics
    notes: Sequence[str] = ()
    first: dict[str, Any] | None = None
    failure: str | None = None

    @property
    def verdict(self) -> str:
        if self.first:
            return DIVERGED
        return FAILED if self.failure else BITWISE

    @property
    def passed(self) -> bool:
        """No mismatch, no failure, and something compared of every kind."""
        return self.verdict == BITWISE and all(self.tally.requests[k] for k in self.kinds)

    def to_json(self) -> dict[str, Any]:
        t = self.tally
        names = ("key", "url", "seed", "minutes", "seconds", "oracle", "verdict", "passed")
        head = {n: getattr(self, n) for n in names}
        kinds = {
            k: {n: getattr(t, n)[k] for n in ("requests", "tokens", "cut", "mismatches")}
            for k in self.kinds
        }
        return head | {
            "requests": t.requests.total(),
            "tokens": t.tokens.total(),
            "tokens_per_second": round(t.tokens.total() / max(self.seconds, 1e-9), 1),
            "mismatches": t.mismatches.total(),
            "cut": t.cut.total(),
            "aborts": t.ways[ABORT] + t.ways[ABORT_STREAM],
            "disconnects": t.ways[DISCONNECT] + t.ways[LEAVE],
            "flushes": t.flushes,
            "flushes_refused": t.flushes_refused,
            "retractions": max(t.retractions, self.counted_retractions or 0),
            "retractions_by_metrics": self.counted_retractions,
            "warm": t.warm,
            "most_at_once": t.most_at_once,
            "kinds": kinds,
            "ways": dict(t.ways),
            "phases": dict(t.phases),
            "notes": list(self.notes),
            "failure": self.failure,
            "first": _short(self.first),
            "server": self.server,
        }

    def text(self) -> str:
        """The result for people: one table by kind, and one line."""
        t, found = self.tally, self.to_json()
        columns = ("kind", "requests", "tokens", "cut short", "mismatches", "")
        rows = [
            (k, *(f"{getattr(t, n)[k]:,}" for n in ("requests", "tokens", "cut", "mismatches")), "")
            for k in self.kinds
        ]
        out = [*format_table(columns, rows), ""]
        out += [f"note: {n}" for n in self.notes]
        if self.first:
            out.append(f"first mismatch: {self.first['request']}, {self.first['way']}: ")
            out[-1] += self.first["difference"]["words"]
        if self.failure:
            out.append(f"the server failed: {self.failure}")
        out.append(
            f"{'PASSED' if self.passed else 'FAILED'}: key {self.key or 'none'}, "
            f"{found['requests']:,} answers and {found['tokens']:,} tokens compared in "
            f"{self.seconds:.0f} s ({found['tokens_per_second']:,.0f} a second), "
            f"{found['mismatches']} mismatches; {found['cut']} cut short, {found['flushes']} "
            f"flushes, {found['retractions']} retractions, up to {found['most_at_once']} at once"
        )
        return "\n".join(out)


def _short(first: dict[str, Any] | None) -> dict[str, Any] | None:
    names = ("request", "kind", "way", "difference", "time", "into_s", "cached_tokens")
    return None if first is None else {n: first[n] for n in names}
