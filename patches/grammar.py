"""Structured output on a CPU: XGrammar's masks in plain memory, applied by its own CPU kernel.

SGLang knows GPU kernels only, so on a CPU the first request with a grammar ends the server.
"""

from __future__ import annotations

from sgl_det.patch import Patch
from sgl_det.patches.table import patches_of

_BACKEND = "sglang.srt.constrained.xgrammar_backend"


def _allocating(original):
    def _allocate_token_bitmask(vocab_size, batch_size):
        from xgrammar import allocate_token_bitmask

        return allocate_token_bitmask(batch_size, vocab_size)  # all ones, and not pinned

    return _allocate_token_bitmask


def _applying(original):
    def apply_vocab_mask(self, logits, vocab_mask):
        from xgrammar import apply_token_bitmask_inplace

        apply_token_bitmask_inplace(logits, vocab_mask)

    return apply_vocab_mask


def patches() -> tuple[Patch, ...]:
    """The patches of a scheduler process on a CPU."""
    rows = (
        (
            "allocate",
            f"{_BACKEND}:_allocate_token_bitmask",
            "c0e34c6093ac",
            "a mask is pinned memory upstream, which needs a GPU",
            _allocating,
        ),
        (
            "apply",
            f"{_BACKEND}:XGrammarGrammar.apply_vocab_mask",
            "08c954c8c4bb",
            "each row is masked by itself, so the other rows' bits stay",
            _applying,
        ),
    )
    return patches_of("cpu.grammar", rows, "none: SGLang masks logits on a GPU only")
