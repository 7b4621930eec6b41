"""A batch whose logits follow from the tokens so far waits until the last of them are known.

SGLang schedules a step while the one before it still runs. What looks at a request's tokens would
see all but the last one, or all, by the schedule.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from sgl_det.patch import Patch
from sgl_det.patches.table import patches_of


def _looks_back(batch: Any) -> bool:
    info = batch.sampling_info
    return info.penalizer_orchestrator.is_required or info.has_custom_logit_processor


def _waiting(original):
    @wraps(original)
    def is_disable_overlap_for_batch(self, batch, last_batch):
        if batch and _looks_back(batch):
            return len(self.result_queue) > 0
        return original(self, batch, last_batch)

    return is_disable_overlap_for_batch


_TABLE = (
    (
        "overlap",
        "sglang.srt.managers.scheduler:Scheduler.is_disable_overlap_for_batch",
        "b4841193b4dd",
        "penalties and custom logit processors see all tokens; other batches overlap as before",
        _waiting,
    ),
)


def patches() -> tuple[Patch, ...]:
    """The patches of every scheduler process."""
    return patches_of("waits", _TABLE, "none: what SGLang looks back at lags by the schedule")
