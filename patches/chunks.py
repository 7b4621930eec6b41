"""Prompts may be cut anywhere, where an attention backend takes the keys in one order.

SGLang's deterministic mode cuts FlashInfer's and Triton's prompts at multiples of 4096 tokens, and
never admits a longer prompt where a chunk is smaller.
"""

from __future__ import annotations

from functools import wraps

from sgl_det.patch import Patch
from sgl_det.patches.table import patches_of


def _anywhere(original):
    @wraps(original)
    def init_deterministic_inference_config(self):
        original(self)
        self.truncation_align_size = None

    return init_deterministic_inference_config


_TABLE = (
    (
        "anywhere",
        "sglang.srt.managers.scheduler:Scheduler.init_deterministic_inference_config",
        "2aaf577088fc",
        "chunks of any size have one order, so none waits for a multiple of 4096 tokens",
        _anywhere,
    ),
)


def patches() -> tuple[Patch, ...]:
    """The patch of a scheduler process whose attention backend needs no aligned chunks."""
    return patches_of("chunks", _TABLE, "https://github.com/sgl-project/sglang/issues/36344")
