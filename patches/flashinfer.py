"""FlashInfer's paged prefill without KV splits.

SGLang's deterministic mode splits the KV of a prefill every 4096 tokens. The partial results need a
workspace that grows with prompt length times chunk size, and beyond its fixed 2 GiB the plan raises in
the scheduler, which ends the server. One pass over the KV needs no workspace and has one order.
"""

from __future__ import annotations

from functools import wraps

from sgl_det.patch import Patch


def _without_split(original):
    @wraps(original)
    def plan(self, *args, **kwargs):
        if kwargs.get("fixed_split_size"):
            kwargs |= {"fixed_split_size": None, "disable_split_kv": True}
        return original(self, *args, **kwargs)

    return plan


def patches() -> tuple[Patch, ...]:
    """The patches of a scheduler process that runs FlashInfer."""
    return (
        Patch(
            name="flashinfer.prefill.no_split",
            target="flashinfer.prefill:BatchPrefillWithPagedKVCacheWrapper.plan",
            requires="flashinfer-python>=0.6.15,<0.6.16",
            fingerprints=("e0c766fd6ff5",),
            why="prefill takes the KV of a request in one pass: one order, and no workspace to "
            "overflow on long prompts",
            upstream="https://github.com/sgl-project/sglang/issues/30244",
            wrap=_without_split,
        ),
    )
