"""What is in flight and what was a moment ago; the record of a mismatch is made of it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from sgl_det.probe.client import Facts
from sgl_det.soak.answers import Difference
from sgl_det.soak.send import Act, Book, Reply

VERSION = 1
# How far back a record reaches: the prefix cache holds what ended a moment ago.
BEFORE_S = 2.0
_KEPT = 2000


class Journal:
    """Acts with their start and end, in seconds of one clock."""

    def __init__(self) -> None:
        self.running: dict[int, Act] = {}
        self._ended: deque[Act] = deque(maxlen=_KEPT)

    def begin(self, act: Act) -> None:
        act.start = time.perf_counter()
        self.running[id(act)] = act

    def end(self, act: Act) -> None:
        act.end = time.perf_counter()
        del self.running[id(act)]
        self._ended.append(act)

    def around(self, act: Act) -> list[Act]:
        """What ran beside an act or ended shortly before it, and the act, by start."""
        since = act.start - BEFORE_S
        found = [a for a in self._ended if a.end >= since and a is not act]
        found += [a for a in self.running.values() if a is not act]
        return sorted([*found, act], key=lambda a: a.start)


def record(
    journal: Journal, book: Book, act: Act, reply: Reply, place: Difference, about: dict[str, Any]
) -> dict[str, Any]:
    """Everything that sends the neighbourhood again. about: key, seed, url, server, into_s.

    Starts are in seconds from the target's.
    """
    acts = journal.around(act)
    names = dict.fromkeys(n for a in acts for n in a.names)
    entry = book[reply.name]
    return {
        "sgl_det_soak_mismatch": VERSION,
        **about,
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "request": reply.name,
        "kind": entry.item.kind,
        "way": act.way,
        "route": entry.item.route,
        "body": entry.item.body,
        "difference": place.to_json(),
        "expected": entry.expected,
        "found": reply.parts,
        "cut": reply.cut,
        "cached_tokens": reply.meta.get("cached_tokens"),
        "retractions": reply.meta.get("num_retractions"),
        "target": acts.index(act),
        "acts": [
            asdict(a)
            | {
                "start": round(a.start - act.start, 4),
                "end": None if a.end is None else round(a.end - act.start, 4),
            }
            for a in acts
        ],
        "entries": {n: {"item": asdict(book[n].item), "expected": book[n].expected} for n in names},
    }


def recorded(facts: Facts) -> dict[str, Any]:
    """The server in a record and a result: flags, and the limits that sizes follow."""
    limits = {n: getattr(facts, n) for n in ("max_total", "max_running", "max_input", "chunk")}
    return facts.recorded | limits
