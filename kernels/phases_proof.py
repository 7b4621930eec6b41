"""The proof that a backend's attention gives a row the same bits in every phase, on this machine.

A backend's patches hand in how they attend, `Attend`; what they plan is theirs. Compared with whole
prompts, all at once, are prompts after a prefix, prompts alone, and decode, alone and in a batch,
at lengths on both sides of the backend's tile and split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from sgl_det.kernels.attention_proof import Heads


class Step(NamedTuple):
    """One forward of some requests: the last ``new`` of ``lengths`` keys are its tokens.

    q [T, H, D]; table [B, longest] of slots in pools [slots, 1, G, D]; new is 1 in decode.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    lengths: list[int]
    new: list[int]
    decode: bool


# A step -> o [T, H, D].
Attend = Callable[[Step], torch.Tensor]
# A name, the (request, keys, new tokens) of a step, and whether it is one of decode.
Steps = tuple[str, list[tuple[int, int, int]], bool]


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt: queries [n, H, D] of its tokens, and the slots [n] of their keys."""

    q: torch.Tensor
    slots: torch.Tensor

    def __len__(self) -> int:
        return len(self.slots)


def lengths(tile: int, split: int) -> tuple[int, ...]:
    """Both sides of a tile and of a split, and beyond two: few, since their memory adds up."""
    edges = (tile - 1, tile, tile + 1, 2 * tile + 1, split - 1, split, split + 1)
    return (1, *edges, 2 * split + 1)


def first_mismatch(
    attend: Attend,
    heads: Heads,
    of: Sequence[int],
    device: torch.device | str = "cuda",
    others: Callable[[Sequence[int]], Iterator[Steps]] | None = None,
    short: int = 1 << 30,
) -> str:
    """What differs from the whole prompts of ``of`` keys, in a clause, or "" if no bit does.

    others   the steps that are compared with them, by default those of the header
    short    keys up to which the backend takes another kernel, where no request has more
    """
    source = torch.Generator(device).manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=heads.dtype, device=device).normal_(generator=source)

    slots = sum(of) + 7
    pools = [made(slots, 1, heads.keys, heads.d) for _ in "kv"]
    place = torch.randperm(slots, device=device, generator=source).int()[: sum(of)]
    requests = [
        Request(made(len(some), heads.queries, heads.d), some) for some in place.split(list(of))
    ]
    whole = _run(attend, pools, requests, [(i, n, n) for i, n in enumerate(of)])
    make = others or partial(_others, group=heads.queries // heads.keys, short=short)
    for name, steps, decode in make(of):
        found = _run(attend, pools, requests, steps, decode)
        for (i, end, new), o in zip(steps, found, strict=True):
            count = int((_bits(o) != _bits(whole[i][end - new : end])).sum())
            if count:
                return f"{count} elements of a request of {end} keys differ {name}"
    return ""


def _others(of: Sequence[int], group: int, short: int) -> Iterator[Steps]:
    every = list(enumerate(of))
    few = [(i, n) for i, n in every if n <= short]
    middle = max(2, 40 // group)  # tokens whose rows of all heads fill a middle query tile
    for name, new in (
        ("after a half of it", lambda n: n - n // 2),
        ("in a chunk of 17 tokens", lambda n: min(n, 17)),
        (f"in a chunk of {middle} tokens", lambda n: min(n, middle)),
        ("in a chunk of one token", lambda n: 1),
    ):
        yield name, [(i, n, new(n)) for i, n in every], False
        yield f"{name}, among short ones", [(i, n, new(n)) for i, n in few], False
    yield "among short ones", [(i, n, n) for i, n in few], False
    for i, n in (every[0], every[len(every) // 2], every[-1]):
        yield "alone", [(i, n, n)], False
    yield "in decode alone", [(*every[-1], 1)], True
    yield "in decode", [(i, n, 1) for i, n in every], True
    # Alone and by twos, since few requests may have a kernel of their own.
    for i, n in few:
        yield "in decode alone", [(i, n, 1)], True
    for one, two in zip(few, few[1:], strict=False):
        yield "in decode of two", [(*one, 1), (*two, 1)], True
    yield "in decode of a half", [(i, n // 2 + 1, 1) for i, n in every], True
    # So many that no request is shared out, and one of them long.
    many = [(i, n, 1) for i, n in every if n <= of[1]] * 40
    yield "in decode of many", [*many, (len(of) - 1, of[-1], 1)], True


def _run(
    attend: Attend,
    pools: Sequence[torch.Tensor],
    requests: Sequence[Request],
    steps: Sequence[tuple[int, int, int]],
    decode: bool = False,
) -> list[torch.Tensor]:
    """The attention of each (request, keys, new tokens), in one step."""
    longest = max(end for _, end, _ in steps)
    # Past its keys, a request's table holds another's slots.
    table = torch.stack(
        [requests[i].slots[torch.arange(longest) % len(requests[i])] for i, _, _ in steps]
    )
    q = torch.cat([requests[i].q[end - new : end] for i, end, new in steps])
    new = [n for *_, n in steps]
    o = attend(Step(q, *pools, table, [end for _, end, _ in steps], new, decode))
    return list(o.split(new))


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.int16)
