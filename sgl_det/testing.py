"""Bitwise comparisons for tests, benchmarks and users: equal bytes, or the place of the difference.

There are no tolerances here. A NaN equals the same NaN, and 0.0 differs from -0.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["TokenDivergence", "assert_bitwise_equal", "first_divergence"]


@dataclass(frozen=True, slots=True)
class TokenDivergence:
    """The first place where two answers to one request differ; None where an answer has ended."""

    index: int
    tokens: tuple[Any, Any]
    logprobs: tuple[str | None, str | None]  # float.hex()

    def __str__(self) -> str:
        (t0, t1), (p0, p1) = self.tokens, self.logprobs
        return f"token {self.index}: id {t0} | {t1}, logprob {p0} | {p1}"


def first_divergence(
    answer_a: tuple[Sequence, Sequence | None], answer_b: tuple[Sequence, Sequence | None]
) -> TokenDivergence | None:
    """The first token at which two answers differ in id, in the bits of its logprob, or in length.

    An answer is (token ids [T], logprobs [T]); logprobs are floats, or text from ``float.hex()``.
    None in place of either answer's logprobs compares the ids alone.
    Returns None when the answers are bitwise equal.
    """
    (ids_a, raw_a), (ids_b, raw_b) = answer_a, answer_b
    if raw_a is None or raw_b is None:
        probs_a, probs_b = [None] * len(ids_a), [None] * len(ids_b)
    else:
        probs_a, probs_b = [_hex(p) for p in raw_a], [_hex(p) for p in raw_b]
    for name, ids, probs in (("first", ids_a, probs_a), ("second", ids_b, probs_b)):
        if len(ids) != len(probs):
            raise ValueError(
                f"the {name} answer has {len(ids)} token ids and {len(probs)} logprobs; "
                f"give one logprob for each token"
            )
    for i in range(max(len(ids_a), len(ids_b))):
        a = (ids_a[i], probs_a[i]) if i < len(ids_a) else (None, None)
        b = (ids_b[i], probs_b[i]) if i < len(ids_b) else (None, None)
        if a != b:
            return TokenDivergence(i, (a[0], b[0]), (a[1], b[1]))
    return None


def assert_bitwise_equal(actual: torch.Tensor, expected: torch.Tensor, name: str = "") -> None:
    """Raise AssertionError unless two tensors have equal shape, dtype and bytes.

    The message gives the number of elements that differ, the first one's coordinate and both values
    with their bytes. The tensors may be of any shape and dtype, on any devices, strided or not.
    """
    prefix = f"{name}: " if name else ""
    for what in ("shape", "dtype"):
        found, wanted = getattr(actual, what), getattr(expected, what)
        if found != wanted:
            raise AssertionError(f"{prefix}{what} is {_plain(found)}, expected {_plain(wanted)}")
    a, b = _bytes(actual), _bytes(expected)
    if a.device != b.device:
        a, b = a.cpu(), b.cpu()
    differs = (a != b).any(dim=1)
    count = int(differs.sum())
    if not count:
        return
    flat = int(differs.nonzero()[0])
    place = _coordinate(flat, actual.shape)
    raise AssertionError(
        f"{prefix}{count} of {len(differs)} elements differ in their bits, first at {place}: "
        f"{_show(actual[place], a[flat])}, expected {_show(expected[place], b[flat])}"
    )


def _hex(value: float | str | None) -> str | None:
    return value if value is None or isinstance(value, str) else float(value).hex()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as uint8 [elements, bytes an element]."""
    import torch

    whole = tensor.detach().resolve_conj().resolve_neg()
    # Of one element any stride counts as contiguous, and another type needs stride 1.
    flat = whole.clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).reshape(flat.numel(), flat.element_size())


def _coordinate(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    place = []
    for size in reversed(shape):
        flat, i = divmod(flat, size)
        place.append(i)
    return tuple(reversed(place))


def _show(element: torch.Tensor, raw: torch.Tensor) -> str:
    value = element.item()
    shown = value.hex() if isinstance(value, float) else repr(value)
    # Most significant byte first, as a hexadecimal number is read (tensors are little-endian).
    return f"{shown} (0x{bytes(raw.tolist()[::-1]).hex()})"


def _plain(value: Any) -> Any:
    return value if isinstance(value, str) else (tuple(value) if "Size" in repr(value) else value)
