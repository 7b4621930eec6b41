"""The kinds of requests: each is a function of the server's limits, a seed and a number."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sgl_det.axis import Axis
from sgl_det.probe.cases_sampled import GRAMMARS, SAMPLED
from sgl_det.probe.client import Facts
from sgl_det.probe.prompts import texts
from sgl_det.soak.items import CHAT, TOP_LOGPROBS, Item, Sizes, native

GROUP = 4  # requests that share a prefix; turns of a conversation are one fewer
# What a request may ask of log-probabilities besides its own and the top few.
_ASKED: tuple[dict[str, Any], ...] = (
    {"logprob_start_len": 0},
    {"logprob_start_len": 0, "top_logprobs_num": 20},
    {"top_logprobs_num": 0},
    {"token_ids_logprob": [0, 5, 9]},
    {"logprob_start_len": 2, "top_logprobs_num": 1, "token_ids_logprob": [3]},
)


@dataclass(frozen=True, slots=True)
class Source:
    """What makes the requests of one server and seed."""

    facts: Facts
    sizes: Sizes
    seed: int

    def rng(self, name: str) -> random.Random:
        return random.Random(f"{self.seed}:{name}")

    def ids(self, name: str, n: int) -> list[int]:
        """n random token ids; the same name gives the same."""
        rng = self.rng(name)
        return [rng.randrange(self.facts.vocab_size) for _ in range(n)]


Make = Callable[[Source, str], Iterator[Item]]


def _greedy(source: Source, name: str) -> Iterator[Item]:
    rng, sizes = source.rng(f"{name} sizes"), source.sizes
    prompt = source.ids(name, rng.randint(*sizes.prompt))
    yield native(name, "greedy", prompt, rng.randint(*sizes.answer))


def _short(source: Source, name: str) -> Iterator[Item]:
    rng = source.rng(f"{name} sizes")
    yield native(name, "short", source.ids(name, rng.randint(1, 9)), rng.randint(1, 9))


def _long(source: Source, name: str) -> Iterator[Item]:
    """A prompt of several chunks, or one that ends beside an edge."""
    rng, sizes = source.rng(f"{name} sizes"), source.sizes
    new = rng.randint(2, 16)
    longest = sizes.longest - new
    length = rng.randint(min(sizes.chunk, longest - 1), min(longest, 3 * sizes.chunk))
    if sizes.edges and rng.random() < 0.5:
        length = max(1, rng.choice(sizes.edges) + rng.randint(-9, 1))
    yield native(name, "long", source.ids(name, min(length, longest)), new)


def _long_answer(source: Source, name: str) -> Iterator[Item]:
    rng, sizes = source.rng(f"{name} sizes"), source.sizes
    prompt = source.ids(name, rng.randint(*sizes.prompt))
    yield native(name, "long_answer", prompt, rng.randint(*sizes.long_answer))


def _text(source: Source, name: str) -> Iterator[Item]:
    rng, sizes = source.rng(f"{name} sizes"), source.sizes
    text = rng.choice(texts(rng.randrange(10**6)))[: max(8, sizes.prompt[1])]
    yield native(name, "text", text, rng.randint(*sizes.answer))


def _logprobs(source: Source, name: str) -> Iterator[Item]:
    rng, sizes = source.rng(f"{name} sizes"), source.sizes
    prompt = source.ids(name, rng.randint(*sizes.prompt))
    asked = dict(rng.choice(_ASKED))
    yield native(name, "logprobs", prompt, rng.randint(2, sizes.answer[1]), None, asked)


def _seeded(source: Source, name: str) -> Iterator[Item]:
    rng, sizes = source.rng(f"{name} sizes"), source.sizes
    # Stock SGLang ends at a seeded request with min_p.
    known = source.facts.claims is not None
    way = rng.choice([v for v in SAMPLED.values() if known or "min_p" not in v])
    drawn = way | {"sampling_seed": rng.randrange(2**31)}
    prompt = source.ids(name, rng.randint(*sizes.prompt))
    yield native(name, "seeded", prompt, rng.randint(*sizes.answer), drawn)


def _structured(source: Source, name: str) -> Iterator[Item]:
    rng, sizes = source.rng(f"{name} sizes"), source.sizes
    given = rng.choice([*GRAMMARS.values()]) | {"ignore_eos": False}
    if rng.random() < 0.5:
        given |= {"temperature": 1.0, "top_p": 0.95, "sampling_seed": rng.randrange(2**31)}
    prompt = source.ids(name, rng.randint(*sizes.prompt))
    yield native(name, "structured", prompt, rng.randint(*sizes.answer), given)


def _shared_prefix(source: Source, name: str) -> Iterator[Item]:
    """One prefix, what follows it in several ways, and the prefix itself."""
    rng, sizes = source.rng(f"{name} sizes"), source.sizes
    most = sizes.longest - sizes.answer[1] - 40
    length = rng.choice([n for n in (*sizes.edges, 33, 90) if n <= most] or [most])
    prefix = source.ids(name, max(2, length + rng.randint(-2, 2)))
    for i in range(GROUP):
        ids = [*prefix, *source.ids(f"{name} {i}", i * rng.randint(1, 12))]
        yield native(f"{name}-{i}", "shared_prefix", ids, rng.randint(*sizes.answer))


def _multi_turn(source: Source, name: str) -> Iterator[Item]:
    """Turns of one conversation: each goes on from what was generated before it."""
    rng, sizes = source.rng(f"{name} sizes"), source.sizes
    after = None
    for i in range(GROUP - 1):
        mine = source.ids(f"{name} {i}", rng.randint(3, max(4, sizes.longest // 12)))
        new = rng.randint(4, max(5, min(sizes.answer[1], sizes.longest // 12)))
        drawn = {}
        if _claimed(source.facts, Axis.SAMPLED) and rng.random() < 0.3:
            drawn = {"temperature": 0.9, "sampling_seed": rng.randrange(2**31)}
        item = native(f"{name}-{i}", "multi_turn", mine, new, drawn, after=after)
        yield item
        after = item.name


def _chat(source: Source, name: str) -> Iterator[Item]:
    rng, sizes = source.rng(f"{name} sizes"), source.sizes
    said = texts(rng.randrange(10**6))
    messages = [{"role": "user", "content": said[0]}]
    if rng.random() < 0.5:
        messages += [
            {"role": "assistant", "content": said[1]},
            {"role": "user", "content": said[2]},
        ]
    new = rng.randint(*sizes.answer)
    body = {"model": source.facts.model, "messages": messages, "max_tokens": new}
    body |= {"logprobs": True, "top_logprobs": TOP_LOGPROBS, "temperature": 0.0}
    body |= {"ignore_eos": True}
    if _claimed(source.facts, Axis.SAMPLED) and rng.random() < 0.5:
        body |= {"temperature": 0.8, "top_p": 0.9, "seed": rng.randrange(2**31)}
    length = 24 + sum(len(m["content"]) for m in messages)
    yield Item(name, "chat", body, length, new, CHAT)


# Kind -> the axis that a server must claim for it, and what makes one request or a few that belong
# together.
KINDS: dict[str, tuple[Axis, Make]] = {
    "greedy": (Axis.BATCH_SIZE, _greedy),
    "seeded": (Axis.SAMPLED, _seeded),
    "structured": (Axis.STRUCTURED, _structured),
    "logprobs": (Axis.LOGPROB_NEIGHBOUR, _logprobs),
    "long": (Axis.CHUNKED_PREFILL, _long),
    "short": (Axis.LONG_BESIDE_SHORT, _short),
    "long_answer": (Axis.PREFILL_VS_DECODE, _long_answer),
    "shared_prefix": (Axis.PREFIX_CACHE, _shared_prefix),
    "multi_turn": (Axis.PREFIX_CACHE, _multi_turn),
    "text": (Axis.BATCH_COMPOSITION, _text),
    "chat": (Axis.BATCH_COMPOSITION, _chat),
}


def _claimed(facts: Facts, axis: Axis) -> bool:
    return facts.claims is None or axis in facts.claims


def usable(facts: Facts) -> list[str]:
    """The kinds that the server claims, or can answer where it makes no claims."""
    return [
        kind
        for kind, (axis, _) in KINDS.items()
        if _claimed(facts, axis) and (kind != "structured" or facts.grammar)
    ]


def plan(facts: Facts, seed: int, n: int, kinds: list[str]) -> list[Item]:
    """About n requests, of every kind one at least; a function of the limits and the seed.

    Requests that belong together stay so, in their order.
    """
    source = Source(facts, Sizes.of(facts), seed)
    found: dict[str, list[Item]] = {kind: [] for kind in kinds}
    number = 0
    while sum(map(len, found.values())) < n or not all(found.values()):
        # Groups hold several, so the kind with the fewest is next.
        kind = min(kinds, key=lambda k: len(found[k]))
        found[kind] += KINDS[kind][1](source, f"{kind}-{number}")
        number += 1
    return [item for kind in kinds for item in found[kind]]
