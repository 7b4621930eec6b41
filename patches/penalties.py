"""Penalties follow from the tokens that a request has generated, and not from when it was batched.

While SGLang schedules a step, the last one's token is still being computed: it penalises the token
before it, or the last of the prompt, and where another's prefill came in between it leaves one out
and counts the next twice. A retracted request starts again with nothing penalised. Here each token
is counted once, before the step that follows it, which therefore waits for it (`waits.py`); and
what is subtracted is one sum, with and without `--disable-overlap-schedule`.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from sgl_det.patch import Patch
from sgl_det.patches.table import patches_of

_COUNTED = "_sgl_det_counted"  # on a request: how many of its tokens are in the penalties


def _penalised(params: Any) -> bool:
    additive = params.frequency_penalty or params.presence_penalty
    return bool(additive or params.min_new_tokens or params.repetition_penalty != 1.0)


def catch_up(orchestrator: Any) -> None:
    """Count the tokens of the batch's requests that are known and have not been counted."""
    new = []
    for req in orchestrator.reqs():
        begin = getattr(req, _COUNTED, 0)
        new.append(req.output_ids[begin:] if _penalised(req.sampling_params) else ())
        setattr(req, _COUNTED, len(req.output_ids))
    for at in range(max(map(len, new), default=0)):
        # One token of a row at a time: a sum of equal numbers has an order too.
        rows = [row for row, ids in enumerate(new) if at < len(ids)]
        _count(orchestrator, rows, [new[row][at] for row in rows])


def _count(orchestrator: Any, rows: list[int], ids: list[int]) -> None:
    import torch
    from sglang.srt.sampling import penaltylib

    place = torch.tensor((rows, ids), dtype=torch.int64).to(orchestrator.device)
    row, token = place[0], place[1]
    for kind, penalizer in orchestrator.penalizers.items():
        if not penalizer.is_prepared():
            continue
        if kind is penaltylib.BatchedFrequencyPenalizer:
            sums = penalizer.cumulated_frequency_penalties
            sums[row, token] = sums[row, token] + penalizer.frequency_penalties[row, 0]
        elif kind is penaltylib.BatchedPresencePenalizer:
            found = penalizer.presence_penalties[row, 0]
            penalizer.cumulated_presence_penalties[row, token] = found
        elif kind is penaltylib.BatchedRepetitionPenalizer:
            found = penalizer.repetition_penalties[row, 0]
            penalizer.cumulated_repetition_penalties[row, token] = found
        elif kind is penaltylib.BatchedMinNewTokensPenalizer:
            penalizer.len_output_tokens[row, 0] = penalizer.len_output_tokens[row, 0] + 1
        else:
            raise ValueError(f"{kind.__name__} counts tokens in a way that is not known")


def _beginning(original):
    @wraps(original)
    def __init__(self, vocab_size, batch, penalizers):
        original(self, vocab_size, batch, penalizers)
        for req in batch.reqs:
            setattr(req, _COUNTED, 0)
        if self.is_required:
            catch_up(self)  # of a request that was retracted

    return __init__


def _counting(original):
    @wraps(original)
    def cumulate_penalty_output_tokens(self):
        catch_up(self.sampling_info.penalizer_orchestrator)

    return cumulate_penalty_output_tokens


def _adding(original):
    @wraps(original)
    def apply(self, logits, repeat=None):
        # For one row a request this is the sum that a step scheduled ahead takes.
        return original(self, logits, 1 if repeat is None else repeat)

    return apply


def _forwarding(original):
    @wraps(original)
    def copy_for_forward(self):
        if self.penalizer_orchestrator.is_required:
            catch_up(self.penalizer_orchestrator)
        return original(self)

    return copy_for_forward


_TABLE = (
    (
        "begin",
        "sglang.srt.sampling.penaltylib.orchestrator:BatchedPenalizerOrchestrator.__init__",
        "ff5a0306e753",
        "a retracted request is penalised for the tokens that it had",
        _beginning,
    ),
    (
        "sum",
        "sglang.srt.sampling.penaltylib.orchestrator:BatchedPenalizerOrchestrator.apply",
        "57d9142a34ac",
        "without overlap they are added one by one, in the order of a set; with it, their sum is",
        _adding,
    ),
    (
        "count",
        "sglang.srt.managers.schedule_batch:ScheduleBatch.cumulate_penalty_output_tokens",
        "2f55fa9649e7",
        "each token is counted once, whatever was scheduled in between",
        _counting,
    ),
    (
        "forward",
        "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo.copy_for_forward",
        "02f4d656a91d",
        "the last token is counted before the step that follows it",
        _forwarding,
    ),
)


def patches() -> tuple[Patch, ...]:
    """The patches of every scheduler process."""
    return patches_of("penalties", _TABLE, "none: SGLang's penalties lag behind by the schedule")
