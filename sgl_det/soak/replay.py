"""Sends again what a mismatch was recorded with, and says whether it comes back."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sgl_det.probe.client import ProbeError
from sgl_det.soak import journal, oracle
from sgl_det.soak.answers import Difference, difference
from sgl_det.soak.items import Item
from sgl_det.soak.send import Act, Book, Entry, send
from sgl_det.soak.wire import Refused, ServerFailed, SoakServer

# The first attempt keeps the recorded times; later ones move each start by up to this much.
_JITTER_S = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What came back: how many attempts were made, and in how many the target, or only its
    neighbours, differed.

    cold: how the target, alone and cold, differs from the recorded oracle, under the same key.
    """

    url: str
    request: str
    key: str | None
    recorded_key: str | None
    times: int
    target: int
    others: int
    cold: Difference | None
    first: str

    @property
    def reproduced(self) -> bool:
        return bool(self.target or self.others or self.cold)

    def to_json(self) -> dict[str, Any]:
        names = ("url", "request", "key", "recorded_key", "times", "target", "others", "first")
        found = {n: getattr(self, n) for n in names} | {"reproduced": self.reproduced}
        return found | {"cold": self.cold.to_json() if self.cold else None}

    def text(self) -> str:
        lines = []
        if self.key != self.recorded_key:
            lines.append(
                f"note: recorded under key {self.recorded_key or 'none'}, the server's is "
                f"{self.key or 'none'}: compared with this server's own answers, alone and cold"
            )
        if self.cold:
            lines.append(f"alone and cold {self.request} differs: {self.cold.words}")
        if self.first:
            lines.append(f"first: {self.first}")
        lines.append(
            f"{'REPRODUCED' if self.reproduced else 'NOT REPRODUCED'}: {self.request} differed in "
            f"{self.target} of {self.times} attempts, only neighbours in {self.others}"
        )
        return "\n".join(lines)


def load(path: str | Path) -> dict[str, Any]:
    """A record of a mismatch. Raises ProbeError where the file is none."""
    return oracle.read(Path(path), "sgl_det_soak_mismatch", journal.VERSION, "--replay")


async def replay(
    url: str,
    record: dict[str, Any],
    *,
    times: int = 10,
    keep_going: bool = False,
    api_key: str | None = None,
    progress: bool = True,
    timeout_s: float = 300.0,
) -> Replayed:
    """Send the recorded neighbourhood up to so many times, half of them on a cold cache.

    It ends when something differs, unless keep_going.

    Under the recorded key answers are compared with the recorded oracle; under another one (a
    server with a fix has another) with this server's own, measured first. Raises ProbeError, or
    ServerFailed, in one sentence.
    """
    book = {name: Entry(Item(**e["item"]), e["expected"]) for name, e in record["entries"].items()}
    acts = [Act(tuple(a["names"]), a["way"], a["options"], a["start"]) for a in record["acts"]]
    target, cold = record["request"], None
    async with SoakServer(url, api_key, timeout_s) as server:
        facts = await server.discover()
        alone = await oracle.measure(server, book[target].item)
        if facts.key is not None and facts.key == record["key"]:
            cold = difference(book[target].expected, alone)
        else:
            book = await _measured_here(server, book)
        counts, first, i = {"target": 0, "others": 0}, "", 0
        for i in tqdm(range(times), desc="replay", disable=not progress, leave=False):
            if i % 2 == 0:
                await server.flush()
            found = await _attempt(server, book, acts, random.Random(i), _JITTER_S if i else 0.0)
            if found:
                counts["target" if target in found else "others"] += 1
                name = target if target in found else next(iter(found))
                first = first or f"{name}: {found[name]}"
                if not keep_going:
                    break
    return Replayed(
        url=url,
        request=target,
        key=facts.key,
        recorded_key=record["key"],
        times=i + 1,
        **counts,
        cold=cold,
        first=first,
    )


async def _measured_here(server: SoakServer, book: Book) -> dict[str, Entry]:
    return {n: Entry(e.item, await oracle.measure(server, e.item)) for n, e in book.items()}


async def _attempt(
    server: SoakServer, book: Book, acts: list[Act], rng: random.Random, jitter_s: float
) -> dict[str, str]:
    """Everything once, at its recorded time: what differed, by name, in words."""
    begun, earliest = time.perf_counter(), min(a.start for a in acts)
    found: dict[str, str] = {}

    async def one(number: int, act: Act) -> None:
        at = begun + act.start - earliest + rng.uniform(0, jitter_s)
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        options = dict(act.options)
        if "rid" in options:
            options["rid"] = f"replay-{rng.getrandbits(40):010x}-{number:06d}"
        try:
            replies = await send(server, book, Act(act.names, act.way, options))
        except Refused as e:
            found.setdefault(act.names[0], str(e))
            return
        for reply in replies:
            place = reply.difference(book)
            if place is not None:
                found.setdefault(reply.name, place.words)

    try:
        async with asyncio.TaskGroup() as group:
            for number, act in enumerate(acts):
                group.create_task(one(number, act))
    except* (ServerFailed, ProbeError) as errors:
        raise errors.exceptions[0] from None
    return found
