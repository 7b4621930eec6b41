"""What a server answered, as bits, and where two answers part."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sgl_det.testing import TokenDivergence, first_divergence

# JSON has no infinities and no NaN: SGLang's encoder writes null for them.
NOT_A_NUMBER = "null"


@dataclass(frozen=True, slots=True)
class Answer:
    """One greedy answer: ids, the bits of their logprobs, and of the most likely ids at each place.

    tokens: [T] ids, or token texts where the endpoint has no ids.
    logprobs: [T] ``float.hex()`` strings, or None when the request did not ask for them.
    top: [T][k] of (id, hex), or None. cached: prompt tokens that came from the prefix cache.
    """

    tokens: tuple[Any, ...]
    logprobs: tuple[str, ...] | None = None
    top: tuple[tuple[tuple[Any, str], ...], ...] | None = None
    cached: int = 0

    def after(self, k: int) -> Answer:
        """What is left of the answer after its first k tokens."""
        return Answer(
            self.tokens[k:],
            None if self.logprobs is None else self.logprobs[k:],
            None if self.top is None else self.top[k:],
        )


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where a request's answer left its oracle's bits."""

    axis: str
    case: str
    request: str
    part: str  # token | logprob | top_logprobs | length
    index: int
    expected_id: Any
    actual_id: Any
    expected_logprob: str | None
    actual_logprob: str | None

    def __str__(self) -> str:
        return (
            f"{self.axis}, case {self.case!r}, request {self.request}: {self.part} differs at "
            f"token {self.index}: expected id {self.expected_id} logprob {self.expected_logprob}, "
            f"found id {self.actual_id} logprob {self.actual_logprob}"
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def hex_bits(value: float | None) -> str:
    """The value as text that keeps every bit of it."""
    return NOT_A_NUMBER if value is None else float(value).hex()


def compare(
    expected: Answer, actual: Answer, *, axis: str, case: str, request: str
) -> Divergence | None:
    """The first divergence of an answer from its oracle in tokens, logprobs or top logprobs.

    A part that only one of the two has is left out. Where the two list different numbers of top
    logprobs, the values that both list are compared and not the ids: which of several ids with one
    value is listed last depends on how many were asked for.
    """
    place = first_divergence((expected.tokens, expected.logprobs), (actual.tokens, actual.logprobs))
    top = _first_top_divergence(expected, actual)
    if place is not None and (top is None or place.index <= top.index):
        part = "logprob"
        if place.tokens[0] != place.tokens[1]:
            ended = place.index >= min(len(expected.tokens), len(actual.tokens))
            part = "length" if ended else "token"
    elif top is not None:
        place, part = top, "top_logprobs"
    else:
        return None
    return Divergence(axis, case, request, part, place.index, *place.tokens, *place.logprobs)


def _first_top_divergence(expected: Answer, actual: Answer) -> TokenDivergence | None:
    if expected.top is None or actual.top is None:
        return None
    for i, (a, b) in enumerate(zip(expected.top, actual.top, strict=False)):
        k = min(len(a), len(b))
        same_request = len(a) == len(b)
        for (id_a, p_a), (id_b, p_b) in zip(a[:k], b[:k], strict=True):
            if p_a != p_b or (same_request and id_a != id_b):
                return TokenDivergence(i, (id_a, id_b), (p_a, p_b))
    return None
