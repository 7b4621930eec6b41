"""The prompts of a probe: all different, and a function of the seed and of the server's limits."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass, replace
from typing import Any

from sgl_det.probe.client import Facts

NEW_TOKENS, QUICK_NEW_TOKENS = 32, 16
# Of the subject: long enough for a difference in the last bit to reach a token.
SUBJECT_NEW_TOKENS = 96
# Both sides of the sizes at which kernels change: 16, 32, 64 and 128 tokens.
LENGTHS = (37, 5, 17, 1, 64, 31, 16, 33, 8, 65, 15, 63, 2, 90, 24, 127, 32, 48, 129, 7)
# On a GPU longer prompts cost little, and reach the tiles and splits that short ones do not.
GPU_LENGTHS = (*LENGTHS, 255, 256, 257, 400, 511, 513, 777)
TEXTS = 6
# Which first token a prompt gets, by the stem of its name and the number behind it: a prompt stays
# what it is whichever axes are chosen.
_FIRST_SLOT = {
    "ids": 0,
    "sampled": 100,
    "structured": 120,
    "chunk": 128,
    "prefix": 160,
    "long": 176,
    "long-answer": 177,
    "chunk-first": 178,
    "chunk-filler": 179,
    "few-opener": 180,
    "few": 181,
    "edge": 246,
    "edge-prefix": 262,
    "edge-cut": 278,
    "edge-long": 294,
}
_WORDS = (
    "a river carries small stones to the sea and nobody counts them twice because every stone is "
    "worn into another shape while light moves over water in patterns that seem to return"
).split()


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: ids, or a text whose length in tokens is what the server counted.

    sampling: parameters of every request with it, as JSON; greedy where it is empty.
    """

    name: str
    ids: tuple[int, ...] | None
    text: str | None
    tokens: int
    new_tokens: int
    sampling: str = ""

    def body(self) -> dict[str, Any]:
        """The part of a /generate request that holds the prompt."""
        return {"text": self.text} if self.ids is None else {"input_ids": list(self.ids)}

    def parameters(self) -> dict[str, Any]:
        """What of ``sampling_params`` belongs to the prompt."""
        return json.loads(self.sampling) if self.sampling else {}

    def with_sampling(self, name: str, **parameters: Any) -> Prompt:
        """The same prompt under another name, with parameters of its own."""
        return replace(self, name=name, sampling=json.dumps(parameters, sort_keys=True))

    def digest(self) -> str:
        """12 hex digits that stand for the prompt, its parameters and the tokens asked for."""
        parts = (self.ids, self.text, self.new_tokens, *([self.sampling] if self.sampling else ()))
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


class Prompts:
    """Makes prompts that share no first token, so that no prefix is shared by chance."""

    def __init__(
        self,
        facts: Facts,
        seed: int,
        texts: list[tuple[str, list[int] | None]],
        new_tokens: int = NEW_TOKENS,
    ):
        self._facts, self._seed, self.new_tokens = facts, seed, new_tokens
        taken = {ids[0] for _, ids in texts if ids}
        firsts = list(range(facts.vocab_size))
        random.Random(f"{seed}:firsts").shuffle(firsts)
        self._firsts = [t for t in firsts if t not in taken] or firsts
        self._made: dict[str, Prompt] = {}
        self.texts = [
            Prompt(f"text-{i}", None, text, len(ids or text.encode()), new_tokens)
            for i, (text, ids) in enumerate(texts)
        ]

    def random(self, name: str, length: int, new_tokens: int | None = None) -> Prompt:
        """A random list of token ids; the same name gives the same prompt.

        The name is a stem of _FIRST_SLOT, or a stem, a dash and a number.
        """
        slot = _first_slot(name)
        name, asked = f"{name}-len{length}", new_tokens or self.new_tokens
        if name not in self._made:
            rng = random.Random(f"{self._seed}:{name}")
            first = self._firsts[slot % len(self._firsts)]
            rest = [rng.randrange(self._facts.vocab_size) for _ in range(length - 1)]
            self._made[name] = Prompt(name, (first, *rest), None, length, asked)
        return self._made[name]

    def pool(self, n: int, *, with_texts: bool = True) -> list[Prompt]:
        """n prompts of mixed lengths; the first is the subject, seen on nearly every axis."""
        lengths = LENGTHS if self._facts.device == "cpu" else GPU_LENGTHS
        longest = max(1, self._facts.max_input - self.new_tokens)
        room = self._facts.max_input - min(lengths[0], longest)
        of_subject = max(1, min(SUBJECT_NEW_TOKENS, room))
        ids = [
            self.random(f"ids-{i}", min(length, longest), None if i else of_subject)
            for i, length in _cycle(lengths, n)
        ]
        if not with_texts or n < 6:
            return ids
        texts = [t for t in self.texts if t.tokens <= longest][: n // 6]
        return [*ids[: n - len(texts)], *texts]

    @property
    def subject(self) -> Prompt:
        return self.pool(1)[0]


def texts(seed: int) -> list[str]:
    """Short texts of different lengths, each with another first letter."""
    rng = random.Random(f"{seed}:texts")
    starts = rng.sample("BCDFGHKLMNPRSTVW", TEXTS)
    return [
        f"{start}{' '.join(rng.choices(_WORDS, k=3 + 4 * i))}." for i, start in enumerate(starts)
    ]


def _first_slot(name: str) -> int:
    if name in _FIRST_SLOT:
        return _FIRST_SLOT[name]
    stem, _, number = name.rpartition("-")
    return _FIRST_SLOT[stem] + int(number)


def _cycle(values: tuple[int, ...], n: int) -> list[tuple[int, int]]:
    return [(i, values[i % len(values)]) for i in range(n)]
