"""The start of a backend whose phases share one order: refused where they do not on this GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgl_det.kernels.phases_proof import Attend


def prove(attend: Attend, model_runner: Any, order: Any) -> None:
    """Prove the attention of the model's heads, and record it.

    order   the ReductionOrder whose tiles and splits the lengths straddle
    Raises RuntimeError where prompts, chunks and decode differ in a bit.
    """
    import torch
    from sglang.srt.runtime_context import get_parallel

    from sgl_det.kernels import proof
    from sgl_det.kernels.attention_proof import Heads
    from sgl_det.kernels.phases_proof import first_mismatch, lengths

    model, shards = model_runner.model_config, get_parallel().attn_tp_size
    heads = Heads(
        queries=model.num_attention_heads // shards,
        keys=model.get_num_kv_heads(shards),
        d=model.head_dim,
        dtype=model_runner.dtype,
    )
    longest = model.context_len
    of = [n for n in lengths(order.block, order.split) if n <= longest]
    name = f"attention {heads.queries}/{heads.keys} heads of {heads.d}"
    with proof.timed():
        found = first_mismatch(attend, heads, of, model_runner.device, short=order.split)
    torch.cuda.empty_cache()
    if found:
        raise RuntimeError(
            f"{name} does not have one order on this GPU: {found}; expected equal bits; take "
            f"another attention backend, and report it"
        )
    proof.PROVEN.setdefault("rows", {})[name] = "sgl_det"
