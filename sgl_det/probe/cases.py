"""What a case is, and what cases share: sending requests together and knowing each one's oracle."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sgl_det.axis import Axis
from sgl_det.probe.client import Facts, ProbeError, Server
from sgl_det.probe.compare import NOT_A_NUMBER, Answer
from sgl_det.probe.prompts import Prompt, Prompts
from sgl_det.probe.replies import native_answer

TOP_LOGPROBS = 5


class Skip(Exception):
    """The server's configuration leaves nothing to vary on this axis; the message says why."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: a prompt, what differs from the oracle's request, and whether it is compared.

    sampling goes into sampling_params, extra beside it. delay is in oracle durations.
    """

    prompt: Prompt
    sampling: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    compared: bool = True
    delay: float = 0.0

    def body(self) -> dict[str, Any]:
        n = self.prompt.new_tokens
        usual = {"temperature": 0.0, "max_new_tokens": n, "ignore_eos": True}
        sampling = usual | self.prompt.parameters() | self.sampling
        common = {"return_logprob": True, "top_logprobs_num": TOP_LOGPROBS} | self.extra
        return self.prompt.body() | common | {"sampling_params": sampling}


@dataclass(frozen=True, slots=True)
class Seen:
    """An answer to compare; expected is the prompt's oracle unless given."""

    request: str
    answer: Answer
    expected: Answer


@dataclass(frozen=True, slots=True)
class Case:
    """One situation, always entered with a cold cache."""

    axis: Axis
    name: str
    needs: tuple[Prompt, ...]  # prompts whose oracles are measured before
    run: Callable[[Context], Awaitable[list[Seen]]]


@dataclass(slots=True)
class Context:
    """What every case of one probe shares."""

    server: Server
    facts: Facts
    prompts: Prompts
    quick: bool
    seed: int
    oracles: dict[Prompt, Answer] = field(default_factory=dict)
    notes: dict[Axis, str] = field(default_factory=dict)
    pace_s: float = 0.2  # median duration of an oracle
    _durations: list[float] = field(default_factory=list)

    def rng(self, name: str) -> random.Random:
        return random.Random(f"{self.seed}:{name}")

    def note(self, axis: Axis, text: str) -> None:
        before = self.notes.get(axis)
        if text not in (before or ""):
            self.notes[axis] = f"{before}; {text}" if before else text

    def fits(self, prompts: Sequence[Prompt]) -> bool:
        """Whether the prompts can run together: none waits, none is preempted."""
        tokens = sum(p.tokens + p.new_tokens + self.facts.page_size for p in prompts)
        return len(prompts) <= self.facts.max_running and tokens <= 0.9 * self.facts.max_total

    def room(self, n: int) -> int:
        """The largest number of pool prompts, up to n, that run together."""
        while n > 1 and not self.fits(self.prompts.pool(n)):
            n -= 1
        return n

    async def measure(self, prompt: Prompt) -> None:
        """The prompt's oracle: a cold cache and nobody else."""
        if prompt in self.oracles:
            return
        await self.server.flush()
        start = time.perf_counter()
        answer = native_answer(await self.server.generate(Ask(prompt).body()))
        self._durations.append(time.perf_counter() - start)
        self.pace_s = sorted(self._durations)[len(self._durations) // 2]
        if answer.cached:
            raise ProbeError(
                f"the server reports {answer.cached} cached tokens right after /flush_cache; "
                f"without a cold cache there is no oracle"
            )
        if answer.logprobs is None or NOT_A_NUMBER in answer.logprobs:
            raise ProbeError(
                f"the logprobs of {prompt.name} are not numbers; a broken model proves nothing"
            )
        self.oracles[prompt] = answer

    async def one(self, ask: Ask) -> Answer:
        if ask.delay:
            await asyncio.sleep(ask.delay * self.pace_s)
        return native_answer(await self.server.generate(ask.body()))

    async def together(self, asks: Sequence[Ask], *, as_list: bool = False) -> list[Seen]:
        """Send the requests at once, each in its own request or all in one list of prompts."""
        if as_list:
            answers = [native_answer(r) for r in await self.server.generate(_list_body(asks))]
        else:
            answers = await asyncio.gather(*(self.one(a) for a in asks))
        return [
            Seen(ask.prompt.name, answer, self.oracles[ask.prompt])
            for ask, answer in zip(asks, answers, strict=True)
            if ask.compared
        ]


def batch_case(axis: Axis, name: str, asks: Sequence[Ask], *, as_list: bool = False) -> Case:
    """A case that sends its requests together and compares each with its oracle."""

    async def run(ctx: Context) -> list[Seen]:
        return await ctx.together(asks, as_list=as_list)

    return Case(axis, name, tuple(a.prompt for a in asks if a.compared), run)


def sampled(prompt: Prompt, i: int) -> Ask:
    """A neighbour that samples; its own answer is not compared."""
    params = (
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 20},
        {"temperature": 1.0},
    )[i % 3]
    return Ask(prompt, params | {"max_new_tokens": 12 + 7 * i % 32}, {}, False)


def _list_body(asks: Sequence[Ask]) -> dict[str, Any]:
    bodies = [a.body() for a in asks]
    return {name: [b[name] for b in bodies] for name in bodies[0]}
