"""Log-probabilities that a request is told, whatever its neighbours ask for or do to it.

SGLang takes the top k of a batch with the largest k that any request in it asks for. Equal values
are common in bf16 logits, and how ``torch.topk`` orders them depends on k and on the shape, so a
neighbour that asks for more changes the ids that a request is told. Here ties go to the lowest id.

A request that loses its place before its first token was seen loses that token's log-probability
in SGLang, and a prompt's log-probability of the vocabulary's last id is told as that of id 0. Here
neither happens.
"""

from __future__ import annotations

from functools import wraps
from typing import Any, NamedTuple

from sgl_det.patch import Patch
from sgl_det.patches.table import patches_of

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


def _heard(original):
    @wraps(original)
    def accept(self, *, req):
        # SGLang takes note of a log-probability as sent where there is none yet: the first is lost.
        if req.output_ids or req.finished():
            original(self, req=req)

    return accept


def _named(original):
    @wraps(original)
    def _process_input_token_logprobs(self, req, input_token_logprobs):
        original(self, req, input_token_logprobs)
        told, last = req.logprob.input_token_logprobs_idx, self.model_config.vocab_size - 1
        asked = req.origin_input_ids[req.logprob_start_len :]
        # SGLang tells of id 0 where a prompt holds the last id of the vocabulary.
        if len(asked) == len(told) and last in asked:
            req.logprob.input_token_logprobs_idx = [
                last if x == last else y for x, y in zip(asked, told, strict=True)
            ]

    return _process_input_token_logprobs


_TIES = "of ids with equal logprobs the lowest is listed first, whatever k others ask for"
_TABLE = (
    ("top", f"{_MODULE}:get_top_logprobs_raw", "b022f4923e1a", _TIES, _ordered),
    ("top_of_chunk", f"{_MODULE}:get_top_logprobs_chunk", "d84125843c70", _TIES, _ordered),
    (
        "first",
        "sglang.srt.managers.scheduler_components.output_streamer"
        ":_GenerationStreamAccumulator.accept",
        "c3021ce1e1c8",
        "a request retracted before its first token has all its log-probabilities in the end",
        _heard,
        "none: it loses the first one in SGLang",
    ),
    (
        "last_id",
        "sglang.srt.managers.scheduler_components.logprob_result_processor"
        ":SchedulerLogprobResultProcessor._process_input_token_logprobs",
        "533830b2cc31",
        "the last id of the vocabulary has its name among a prompt's log-probabilities",
        _named,
        "none: it is told as id 0 in SGLang",
    ),
)


def patches() -> tuple[Patch, ...]:
    """The patches of every scheduler process."""
    ties = "none: the order of ties is not part of SGLang's deterministic mode"
    return patches_of("logprobs", _TABLE, ties)
