"""The load: phases of random acts against one server, each answer compared as it comes."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from sgl_det.axis import Axis
from sgl_det.probe.client import Facts, ProbeError
from sgl_det.soak.answers import Difference
from sgl_det.soak.draw import Draw
from sgl_det.soak.journal import Journal, record
from sgl_det.soak.result import Tally
from sgl_det.soak.send import Act, Book, Reply, send
from sgl_det.soak.wire import Refused, ServerFailed, SoakServer

# More than this the client does not hold at once, however many the server runs.
MOST_AT_ONCE = 512
TICK_S = 0.02
_PRESSURE = 2.5  # tokens asked for at once, in KV pools; on average half of each answer is there
_BUSY_FLUSH = 0.004  # chance at each tick


@dataclass(slots=True)
class Load:
    """One run. first and failure tell why it ended before its time."""

    server: SoakServer
    facts: Facts
    book: Book
    draw: Draw
    rng: random.Random
    seconds: float
    keep_going: bool
    bar: tqdm
    about: dict[str, Any]
    tally: Tally = field(default_factory=Tally)
    journal: Journal = field(default_factory=Journal)
    first: dict[str, Any] | None = None
    failure: str | None = None
    took_s: float = 0.0
    _error: ProbeError | None = None
    _tasks: set[asyncio.Task] = field(default_factory=set)
    _tokens: int = 0
    _start: float = 0.0

    async def run(self) -> None:
        """Until the time is over, or the first mismatch. Raises ProbeError if it cannot go on."""
        self._start = time.perf_counter()
        self.bar.reset(total=self.seconds)
        self.server.doing = "under load"
        try:
            deck = self._phases()
            while not self._over():
                for name, phase in deck:
                    if not self._over():
                        self.tally.phases[name] += 1
                        await phase()
                self.rng.shuffle(deck)
            await self._drain()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self.took_s = time.perf_counter() - self._start
        if self._error:
            raise self._error

    @property
    def may_retract(self) -> bool:
        return self.facts.claims is None or Axis.PREEMPTION in self.facts.claims

    def _phases(self) -> list[tuple[str, Callable]]:
        """The first round goes by this order: a short soak has seen what matters most."""
        first = [("pressure", self._pressure)] if self.may_retract else []
        return [
            ("each", self._each),
            ("burst", self._burst),
            ("idle", self._idle),
            *first,
            ("wave", self._wave),
            ("alike", self._alike),
            *[("steady", self._steady)] * 2,
            ("calm", self._calm),
            ("burst", self._burst),
        ]

    async def _each(self) -> None:
        """What a round must not leave to chance."""
        for acts in self.draw.each():
            self._begin(acts)
        await self._until(lambda: len(self._tasks) < self._crowd(0.3))

    async def _calm(self) -> None:
        most = self.rng.randint(1, 4)
        await self._hold(lambda _: most, self.rng.uniform(0.5, 3))

    async def _steady(self) -> None:
        most = self.rng.randint(self._crowd(0.2), self._crowd())
        await self._hold(lambda _: most, self.rng.uniform(1, 6))

    async def _wave(self) -> None:
        most, period = self._crowd(1.1), self.rng.uniform(1, 5)
        await self._hold(lambda t: int(most * math.sin(math.pi * t / period) ** 2) + 1, 2 * period)

    async def _burst(self) -> None:
        """At once more than the server runs together."""
        for _ in range(self._crowd(self.rng.uniform(1.1, 1.6))):
            self._begin(self.draw.one())
        await self._until(lambda: len(self._tasks) < self._crowd(0.3))

    async def _alike(self) -> None:
        for acts in self.draw.alike(self._crowd()):
            self._begin(acts)
        await self._until(lambda: len(self._tasks) < self._crowd(0.5))

    async def _pressure(self) -> None:
        """For a while more tokens than the KV pool holds, all in answers that grow.

        SGLang admits more and more of them as it learns how long answers are, until it has to
        retract some.
        """
        until = time.perf_counter() + self.rng.uniform(3, 12)
        while not self._over() and time.perf_counter() < until:
            missing = _PRESSURE * self.facts.max_total - self._tokens
            for acts in self.draw.pressing(MOST_AT_ONCE - len(self._tasks), missing):
                self._begin(acts)
            await self._tick()
        await self._until(lambda: len(self._tasks) < self._crowd(0.3))

    async def _idle(self) -> None:
        """Nothing runs, and the cache is emptied."""
        await self._drain()
        if not self._stopped():
            await self._flush()

    def _crowd(self, part: float = 1.0) -> int:
        return max(2, min(MOST_AT_ONCE, int(part * self.facts.max_running)))

    async def _hold(self, most: Callable[[float], int], seconds: float) -> None:
        """As many at once as most(seconds since) says, for so long."""
        begun = time.perf_counter()
        while not self._over() and (t := time.perf_counter() - begun) < seconds:
            while len(self._tasks) < most(t) and self._begin(self.draw.one()):
                pass
            await self._tick()

    async def _until(self, done: Callable[[], bool]) -> None:
        while not done() and not self._over():
            await self._tick()

    async def _drain(self) -> None:
        while self._tasks and not self._stopped():
            await self._tick(flushes=False)

    async def _tick(self, *, flushes: bool = True) -> None:
        if flushes and self.rng.random() < _BUSY_FLUSH:
            await self._flush()
        await asyncio.sleep(TICK_S)
        self._show()

    async def _flush(self) -> None:
        try:
            if await self.server.try_flush():
                self.tally.flushes += 1
            else:
                self.tally.flushes_refused += 1
        except ServerFailed as e:
            self.failure = self.failure or str(e)

    def _stopped(self) -> bool:
        ended = self.failure or self._error or (self.first and not self.keep_going)
        return bool(ended)

    def _over(self) -> bool:
        return self._stopped() or time.perf_counter() - self._start >= self.seconds

    def _begin(self, acts: Sequence[Act]) -> bool:
        """Whether it was begun: not after the end, nor where a pool may not overflow and would."""
        if self._stopped():
            return False
        tokens = max(sum(self.book[n].item.footprint for n in a.names) for a in acts)
        if not self.may_retract and self._tasks:
            if self._tokens + tokens > 0.8 * self.facts.max_total:
                return False
        self._tokens += tokens
        task = asyncio.create_task(self._follow(acts, tokens))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def _follow(self, acts: Sequence[Act], tokens: int) -> None:
        """One act after the other, each compared."""
        try:
            for act in acts:
                await self._do(act)
                if self._stopped():
                    return
        except ServerFailed as e:
            self.failure = self.failure or str(e)
        except ProbeError as e:
            self._error = self._error or e
        finally:
            self._tokens -= tokens

    async def _do(self, act: Act) -> None:
        self.journal.begin(act)
        self.tally.begun(act, len(self.journal.running))
        try:
            replies = await send(self.server, self.book, act)
        except Refused as e:
            self._differs(act, Reply(act.names[0], {}), Difference("status", 0, 200, None, str(e)))
            replies = []
        finally:
            self.journal.end(act)
        if self._stopped():
            return
        for reply in replies:
            self.tally.saw(reply, self.book)
            place = reply.difference(self.book)
            if place is not None:
                self._differs(act, reply, place)

    def _differs(self, act: Act, reply: Reply, place: Difference) -> None:
        self.tally.mismatches[self.book[reply.name].item.kind] += 1
        if self.first is None:
            about = self.about | {"into_s": round(time.perf_counter() - self._start, 3)}
            self.first = record(self.journal, self.book, act, reply, place, about)

    def _show(self) -> None:
        seconds = min(time.perf_counter() - self._start, self.seconds)
        t = self.tally
        tokens = t.tokens.total()
        words = (
            f"{t.requests.total():,} answers, {tokens:,} tokens, "
            f"{tokens / max(seconds, 0.1):,.0f}/s, {t.mismatches.total()} mismatches, "
            f"{len(self.journal.running)} running"
        )
        self.bar.set_description_str(words, refresh=False)
        self.bar.update(seconds - self.bar.n)
