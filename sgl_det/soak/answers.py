"""What a server answered, as plain JSON that keeps every bit, and where two answers part.

An answer is a dict of parts. Logprobs are ``float.hex()`` texts:

tokens, logprobs [T]    top, listed [T][k] of [id, hex]    text    finish (the reason, as JSON)
prompt_tokens, prompt_logprobs [P]    prompt_top, prompt_listed [P][k]    of a prompt's logprobs
prompt_length, as the server counts it
A chat's tokens are texts: that route tells no ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from sgl_det.probe.compare import Answer, compare, hex_bits

Parts = dict[str, Any]
# Part -> the name of its rows in SGLang's meta_info.
_ROWS = {
    "top": "output_top_logprobs",
    "listed": "output_token_ids_logprobs",
    "prompt_top": "input_top_logprobs",
    "prompt_listed": "input_token_ids_logprobs",
}
# Of an answer without log-probabilities.
QUIET = ("tokens", "text", "finish", "prompt_length")
ABORTED = "abort"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where an answer left its oracle: which part, where, both values."""

    part: str
    index: int
    expected: Any
    found: Any
    words: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def native_parts(reply: dict[str, Any]) -> Parts:
    """The parts of a reply of /generate, those that it was asked for."""
    meta = reply["meta_info"]
    parts: Parts = {"text": reply.get("text"), "finish": json.dumps(meta.get("finish_reason"))}
    parts["prompt_length"] = meta.get("prompt_tokens")
    for prefix, name in (("", "output_token_logprobs"), ("prompt_", "input_token_logprobs")):
        rows = meta.get(name)
        if rows is not None and (rows or not prefix):
            parts[f"{prefix}tokens"] = [row[1] for row in rows]
            parts[f"{prefix}logprobs"] = [hex_bits(row[0]) for row in rows]
    if reply.get("output_ids") is not None:
        parts["tokens"] = list(reply["output_ids"])
    for part, name in _ROWS.items():
        if meta.get(name):
            parts[part] = [[[t, hex_bits(p)] for p, t, *_ in row or ()] for row in meta[name]]
    return parts


def choice_parts(replies: Iterable[dict[str, Any]]) -> Parts:
    """The parts of an OpenAI answer: one plain reply, or the events of a stream."""
    choices = [c for reply in replies for c in reply.get("choices") or ()]
    texts = [c["text"] if "text" in c else (c.get("message") or c["delta"]) for c in choices]
    texts = [t if isinstance(t, str) else t.get("content") or "" for t in texts if t]
    reasons = [c["finish_reason"] for c in choices if c.get("finish_reason")]
    parts: Parts = {"text": "".join(texts), "finish": json.dumps(reasons[-1:])}
    told = [c["logprobs"] for c in choices if c.get("logprobs")]
    rows = [row for t in told for row in t.get("content") or ()]
    if rows:
        parts["tokens"] = [row["token"] for row in rows]
        parts["logprobs"] = [hex_bits(row["logprob"]) for row in rows]
        parts["top"] = [
            [[x["token"], hex_bits(x["logprob"])] for x in r["top_logprobs"]] for r in rows
        ]
    elif told and "token_logprobs" in told[0]:
        parts["logprobs"] = [hex_bits(p) for t in told for p in t["token_logprobs"]]
    return parts


def is_aborted(parts: Parts) -> bool:
    reason = json.loads(parts["finish"])
    return isinstance(reason, dict) and reason.get("type") == ABORTED


def difference(
    expected: Parts, found: Parts, only: Iterable[str] | None = None
) -> Difference | None:
    """Where the found parts leave the expected ones; a part that is missing differs too.

    only: the parts that are compared, all of the expected ones by default.
    """
    names = [n for n in (expected if only is None else only) if n in expected]
    wrong = [n for n in names if found.get(n) != expected[n]]
    if not wrong:
        return None
    missing = [n for n in wrong if found.get(n) is None]
    if missing:
        return Difference(missing[0], 0, expected[missing[0]], None, f"{missing[0]} is missing")
    compared = ({n: parts[n] for n in names} for parts in (expected, found))
    return _first(*compared, wrong)


def cut_difference(expected: Parts, found: Parts) -> Difference | None:
    """As above, for an answer that was broken off: what there is must begin the expected one.

    SGLang runs one that is aborted before it began with another prompt, of one token, and sends
    what came of that: then there is nothing to compare.
    """
    if found.get("prompt_length") == 1 != expected.get("prompt_length") and is_aborted(found):
        return None
    n = len(found.get("tokens") or ())
    cut = {
        name: expected[name][:n]
        for name in ("tokens", "logprobs", "top", "listed")
        if expected.get(name) is not None and found.get(name)
    }
    return difference(cut, found)


def _first(expected: Parts, found: Parts, wrong: list[str]) -> Difference:
    """The earliest difference, prompt before answer, each by the probe's comparison."""
    for prefix in ("prompt_", ""):
        a, b = _answer(expected, prefix), _answer(found, prefix)
        place = compare(a, b, axis="soak", case=prefix or "answer", request="")
        if place is not None:
            both = (
                (place.expected_id, place.expected_logprob),
                (place.actual_id, place.actual_logprob),
            )
            words = (
                f"{prefix}{place.part} differs at {place.index}: expected id {both[0][0]} logprob "
                f"{both[0][1]}, found id {both[1][0]} logprob {both[1][1]}"
            )
            return Difference(prefix + place.part, place.index, *map(list, both), words)
    name = wrong[0]
    a, b = expected[name], found[name]
    if not isinstance(a, (list, str)):
        return Difference(name, 0, a, b, f"{name} differs: expected {a!r}, found {b!r}")
    pairs = enumerate(zip(a, b, strict=False))
    i = next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
    around = slice(max(0, i - 20), i + 20)
    words = f"{name} differs at {i}: expected {a[around]!r}, found {b[around]!r}"
    return Difference(name, i, a[around], b[around], words)


def _answer(parts: Parts, prefix: str) -> Answer:
    """The rows of one half as the probe's Answer; ids alone where there are no logprobs."""
    probs, top = parts.get(f"{prefix}logprobs"), parts.get(f"{prefix}top")
    tokens = parts.get(f"{prefix}tokens") or [None] * len(probs or ())
    return Answer(
        tuple(tokens),
        None if probs is None or len(probs) != len(tokens) else tuple(probs),
        None if top is None else tuple(tuple(map(tuple, row)) for row in top),
    )
