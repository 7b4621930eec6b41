"""One request of the plan, and the sizes that the plan's requests take from the server."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from sgl_det.probe.client import Facts

GENERATE, CHAT = "/generate", "/v1/chat/completions"
TOP_LOGPROBS = 5


@dataclass(frozen=True, slots=True)
class Item:
    """A request with everything in its body that decides the answer.

    tokens: of the prompt. new_tokens: at most. after: the name of the turn before, whose prompt and
    answer are put before this one's ids once they are known.
    """

    name: str
    kind: str
    body: dict[str, Any] = field(hash=False)
    tokens: int
    new_tokens: int
    route: str = GENERATE
    after: str | None = None

    @property
    def footprint(self) -> int:
        """KV tokens at the end."""
        return self.tokens + self.new_tokens

    def grown(self, before: Item, answer: list[int]) -> Item:
        """The turn after another: its ids behind that one's and its answer's."""
        ids = [*before.body["input_ids"], *answer, *self.body["input_ids"]]
        return replace(self, body=self.body | {"input_ids": ids}, tokens=len(ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Lengths in tokens: what fits the server, and is worth its time."""

    longest: int  # of prompt and answer together
    chunk: int
    answer: tuple[int, int]
    long_answer: tuple[int, int]
    prompt: tuple[int, int]
    edges: tuple[int, ...]

    @classmethod
    def of(cls, facts: Facts) -> Sizes:
        on_gpu = facts.device != "cpu"
        # Three of the longest fit the KV pool together.
        longest = max(48, min(facts.max_input, facts.max_total // 3, 20_000 if on_gpu else 1200))
        chunk = min(facts.chunk or longest // 2, longest // 2)
        edges = {64, 128, chunk, 2 * chunk, *facts.splits, *(2 * n for n in facts.splits)}
        most = max(8, longest // 4)
        return cls(
            longest=longest,
            chunk=chunk,
            answer=(min(16, most), min(96 if on_gpu else 40, most)),
            long_answer=(min(96, 2 * most), min(400 if on_gpu else 160, 2 * most)),
            prompt=(3, min(400 if on_gpu else 140, most)),
            edges=tuple(sorted(n for n in edges if 8 < n < longest - 48)),
        )


def native(
    name: str,
    kind: str,
    prompt: list[int] | str,
    new_tokens: int,
    sampling: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
    *,
    after: str | None = None,
) -> Item:
    """A request of /generate with log-probabilities of its answer."""
    usual = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
    asked = {"return_logprob": True, "top_logprobs_num": TOP_LOGPROBS} | (extra or {})
    body = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
    length = len(prompt.encode()) if isinstance(prompt, str) else len(prompt)
    body |= asked | {"sampling_params": usual | (sampling or {})}
    return Item(name, kind, body, length, new_tokens, after=after)
