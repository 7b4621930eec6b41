"""FA3 starts only where its phases have one order on this GPU."""

from __future__ import annotations

from functools import wraps
from itertools import accumulate
from typing import Any

from sgl_det.patch import Patch
from sgl_det.patches import phases
from sgl_det.patches.fa3 import PLAN, decode_plan, extend_plan
from sgl_det.patches.table import patches_of


def attend(step: Any) -> Any:
    """A step of the proof at start-up, by the call that every layer makes."""
    import torch
    from sglang.kernels.ops.attention.flash_attention import flash_attn_with_kvcache

    from sgl_det.kernels.attention_proof import Heads
    from sgl_det.kernels.fa3_chunks import CHUNKS

    chunk, device = CHUNKS[step.q.shape[-1]], step.q.device
    lengths = torch.tensor(step.lengths, dtype=torch.int32, device=device)
    starts = torch.tensor([0, *accumulate(step.new)], dtype=torch.int32, device=device)
    if step.decode:
        queries, d = step.q.shape[1:]
        heads = Heads(queries=queries, keys=step.k.shape[2], d=d, dtype=step.q.dtype)
        plan = decode_plan(step.lengths, lengths, step.table, heads)
    else:
        prefix = [n - new for n, new in zip(step.lengths, step.new, strict=True)]
        plan = extend_plan(prefix, step.new, step.table, chunk)
    setattr(lengths, PLAN, plan)
    return flash_attn_with_kvcache(
        q=step.q,
        k_cache=step.k,
        v_cache=step.v,
        page_table=step.table,
        cache_seqlens=lengths,
        cu_seqlens_q=starts,
        max_seqlen_q=max(step.new),
        softmax_scale=step.q.shape[-1] ** -0.5,
        causal=True,
        num_splits=1,
    )


def _start(original):
    @wraps(original)
    def __init__(self, model_runner, *args, **kwargs):
        import torch

        from sgl_det.kernels.attention_order import arch_of
        from sgl_det.kernels.fa3_chunks import reduction_order

        original(self, model_runner, *args, **kwargs)
        d, arch = model_runner.model_config.head_dim, arch_of(torch.device("cuda"))
        phases.prove(
            attend, model_runner, reduction_order(d=d, dtype=model_runner.dtype, arch=arch)
        )

    return __init__


_TABLE = (
    (
        "start",
        "sglang.srt.layers.attention.flashattention_backend:FlashAttentionBackend.__init__",
        "ac11b4ce1f25",
        "prompts, chunks and decode are proven to have one order on this GPU",
        _start,
    ),
)


def patches() -> tuple[Patch, ...]:
    """The patch of a scheduler process that runs FA3."""
    return patches_of("fa3", _TABLE, "none: SGLang proves nothing")
