"""Which ids are listed as a token's top logprobs when several have one value.

SGLang takes the top k of a batch with the largest k that any request in it asks for. Equal values
are common in bf16 logits, and how ``torch.topk`` orders them depends on k and on the shape, so a
neighbour that asks for more changes the ids that a request is told. Here ties go to the lowest id.
"""

from __future__ import annotations

from functools import wraps
from typing import Any, NamedTuple

from sgl_det.patch import Patch

_REQUIRES = "sglang>=0.5.17,<0.5.18"
_MODULE = "sglang.srt.layers.logprob_processor"
_ROWS = 64  # rows at a time: bounds the 64-bit keys to 78 MB for a vocabulary of 152k


class Top(NamedTuple):
    values: Any
    indices: Any


class Ordered:
    """Stands for a logprob tensor [T, V], fp32, where only its top k are asked for."""

    def __init__(self, logprobs) -> None:
        self._logprobs = logprobs

    def topk(self, k: int, dim: int) -> Top:
        """Values and ids [T, k], by descending value, then ascending id."""
        import torch

        vocabulary = self._logprobs.shape[dim]
        k = min(k, vocabulary)
        ids = [_top_ids(rows, k) for rows in self._logprobs.split(_ROWS)]
        indices = torch.cat(ids) if ids else self._logprobs.new_empty((0, k), dtype=torch.int64)
        return Top(self._logprobs.gather(dim, indices), indices)


def _top_ids(rows, k: int):
    import torch

    vocabulary = rows.shape[-1]
    bits = rows.float().contiguous().view(torch.int32)
    # Signed integers in the order of the floats; then one key per id, so that no two are equal.
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    last = torch.arange(vocabulary - 1, -1, -1, device=rows.device)
    keys = (ordered << 32) + last
    return vocabulary - 1 - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)


def _ordered(original):
    @wraps(original)
    def call(logprobs, *args, **kwargs):
        return original(Ordered(logprobs), *args, **kwargs)

    return call


def patches() -> tuple[Patch, ...]:
    """The patches of every scheduler process."""
    return tuple(
        Patch(
            name=f"logprobs.{name}",
            target=f"{_MODULE}:{function}",
            requires=_REQUIRES,
            fingerprints=(seen,),
            why="of ids with equal logprobs the lowest is listed first, whatever k others ask for",
            upstream="none: the order of ties is not part of SGLang's deterministic mode",
            wrap=_ordered,
        )
        for name, function, seen in (
            ("top", "get_top_logprobs_raw", "b022f4923e1a"),
            ("top_of_chunk", "get_top_logprobs_chunk", "d84125843c70"),
        )
    )
