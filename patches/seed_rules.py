"""Which seeds there are, and the seed of a request that names none.

A seed is any 64-bit signed integer. Seeds that the server makes up are in [0, 2^53), so that they
survive clients whose numbers are doubles.

    no seed, no --det-default-seed   drawn afresh for each request
    no seed, --det-default-seed N    a hash of N, the prompt's tokens and the sampling parameters
    sample i of n                    the request's seed for i = 0, a hash of it and i after that

Every answer tells its seed, and a request with that seed and n = 1 gets the same answer.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

NAMES = ("sampling_seed", "seed")  # two names of one parameter
SMALLEST, LARGEST = -(2**63), 2**63 - 1
_BITS = 53
# What does not choose among tokens: the seed's own name, and what is sent when.
_LEFT_OUT = ("sampling_seed", "n", "stream_interval")


@dataclass(slots=True)
class Settings:
    """``--det-default-seed`` of this process."""

    default: int | None = None


SETTINGS = Settings()


def checked(name: str, value: Any) -> int | None:
    """A seed as a client wrote it, None where it gave none. Raises ValueError, naming the field."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (whole and SMALLEST <= value <= LARGEST):
        shown = repr(value)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        raise ValueError(f"{name} is {shown}; expected a 64-bit signed integer")
    return value


def one_of(given: Iterable[tuple[str, Any]]) -> int | None:
    """The seed among fields that may hold one. Raises ValueError where two of them differ."""
    found = [(n, seed) for n, value in given if (seed := checked(n, value)) is not None]
    for name, seed in found[1:]:
        if seed != found[0][1]:
            raise ValueError(f"{found[0][0]} is {found[0][1]} and {name} is {seed}; give one seed")
    return found[0][1] if found else None


def _hashed(*parts: Any) -> int:
    text = json.dumps(parts, separators=(",", ":"))
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"sgl_det").digest()
    return int.from_bytes(digest, "big") >> (64 - _BITS)


def of_sample(seed: int, sample: int) -> int:
    """The seed of sample 0, 1, ... of a request that asks for several."""
    return _hashed("sample", seed, sample) if sample else seed


def made_up(prompt: Any, parameters: dict[str, Any]) -> int:
    """The seed of a request without one; of its content under ``--det-default-seed``."""
    if SETTINGS.default is None:
        return secrets.randbits(_BITS)
    kept = {k: _plain(v) for k, v in sorted(parameters.items()) if k not in _LEFT_OUT}
    return _hashed("content", SETTINGS.default, prompt, kept)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(value[k]) for k in sorted(value, key=str)}
    return sorted(value) if isinstance(value, (set, frozenset)) else value
