"""FlashInfer without KV splits, in prefill and in decode.

SGLang's deterministic mode splits the KV of a prefill every 4096 tokens. The partial results need a
workspace that grows with prompt length times chunk size; beyond its fixed 2 GiB the plan raises in
the scheduler, which ends the server. It splits the KV of a decode step every 2048 tokens, but only
where no CUDA graph was captured, so that the order follows the batch size. One pass has one order,
and needs no workspace.
"""

from __future__ import annotations

from functools import wraps

from sgl_det.patch import Patch

_ONE_PASS = {"fixed_split_size": None, "disable_split_kv": True}


def _prefill(original):
    @wraps(original)
    def plan(self, *args, **kwargs):
        # SGLang asks for a split size in deterministic prefill, and only there.
        if kwargs.get("fixed_split_size"):
            kwargs |= _ONE_PASS
        return original(self, *args, **kwargs)

    return plan


def _decode(original):
    @wraps(original)
    def call_begin_forward(self, *args, **kwargs):
        return original(self, *args, **(kwargs | _ONE_PASS))

    return call_begin_forward


def patches() -> tuple[Patch, ...]:
    """The patches of a scheduler process that runs FlashInfer."""
    backend = "sglang.srt.layers.attention.flashinfer_backend"
    return (
        Patch(
            name="flashinfer.prefill.one_pass",
            target="flashinfer.prefill:BatchPrefillWithPagedKVCacheWrapper.plan",
            requires="flashinfer-python>=0.6.15,<0.6.16",
            fingerprints=("e0c766fd6ff5",),
            why="prefill takes the KV of a request in one pass: one order, and no workspace to "
            "overflow on long prompts",
            upstream="https://github.com/sgl-project/sglang/issues/30244",
            wrap=_prefill,
        ),
        Patch(
            name="flashinfer.decode.one_pass",
            target=f"{backend}:FlashInferIndicesUpdaterDecode.call_begin_forward",
            requires="sglang>=0.5.17,<0.5.18",
            fingerprints=("2f8a4ee39ad1",),
            why="decode takes the KV in one pass with and without a CUDA graph, so the order does "
            "not follow the batch size",
            upstream="none: graph and eager decode differ beyond 2048 tokens in SGLang",
            wrap=_decode,
        ),
    )
