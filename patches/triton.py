"""SGLang's Triton backend on our attention kernels: prefill and decode in one order.

SGLang has two kernels with orders of their own, so that the bits of a cached key depend on whether
prefill or decode computed it. In deterministic mode its decode leaves a partial result for every
256 tokens of the longest context, whatever the load.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from sgl_det.patch import Patch
from sgl_det.patches import chunks, decode_programs
from sgl_det.patches.table import patches_of

_BACKEND = "sglang.srt.layers.attention.triton_backend:TritonAttnBackend"


def _extend(original):
    @wraps(original)
    def _forward_extend_unified(
        self, q, o, layer, forward_batch, causal, logits_soft_cap, sinks, score_mod=None, **more
    ):
        from sgl_det.kernels.attention import attention

        if not causal or self.forward_metadata.custom_mask is not None:
            raise RuntimeError(
                f"layer {layer.layer_id} has attention that is not causal, expected causal; serve "
                f"a decoder of text"
            )
        n, pool = forward_batch.batch_size, self.token_to_kv_pool
        attention(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            self.req_to_token,
            forward_batch.req_pool_indices[:n],
            self.forward_metadata.qo_indptr[: n + 1],
            forward_batch.seq_lens[:n],
            self.forward_metadata.max_extend_len,
            _options(layer, logits_soft_cap, sinks, score_mod, pool),
            out=o.view(-1, layer.tp_q_head_num, layer.v_head_dim),
        )
        return o

    return _forward_extend_unified


def _decode(original):
    @wraps(original)
    def forward_decode(
        self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None, score_mod=None, **more
    ):
        from sglang.srt.layers.attention.triton_backend import logit_capping_mod
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        from sgl_det.kernels.attention_decode import decode_attention

        metadata, pool = self.forward_metadata, self.token_to_kv_pool
        if save_kv_cache:
            where = (forward_batch.out_cache_loc, metadata.swa_out_cache_loc)
            where = KVWriteLoc(*where, full_loc=metadata.out_cache_loc_full_physical)
            self._set_kv_buffer(forward_batch, layer, where, k, v, layer.k_scale, layer.v_scale)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        cap = logit_capping_mod(layer.logit_capping_method, layer.logit_cap)
        shared = decode_programs.shared(
            self.sgl_det_work, len(q), layer.tp_k_head_num, self.sgl_det_order
        )
        # The list of all slots is made before the graph is replayed: the scheduler may write the
        # table then. SGLang's list for windows lacks the oldest key that prefill sees.
        options = _options(layer, cap, sinks, score_mod, pool)
        o = decode_attention(
            q,
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            metadata.kv_indices,
            metadata.kv_indptr[1 : len(q) + 1],
            forward_batch.seq_lens,
            options,
            work=self.sgl_det_work,
            shared=shared,
        )
        return o.view(len(q), -1)

    return forward_decode


def _options(layer: Any, cap: float, sinks: Any, score_mod: Any, pool: Any):
    """What our kernels are told of a layer. Raises RuntimeError on what they do not hold."""
    from sgl_det.kernels.attention import Options

    asked = {
        "a score function": score_mod is not None,
        "scaled keys": layer.k_scale is not None,
        "a temperature": layer.xai_temperature_len > 0,
        "values of another size than keys": layer.qk_head_dim != layer.v_head_dim,
    }
    if any(asked.values()):
        found = " and ".join(name for name, there in asked.items() if there)
        raise RuntimeError(
            f"layer {layer.layer_id} has attention with {found}, expected none of it; serve "
            f"another model or another attention backend"
        )
    window = -1 if layer.sliding_window_size is None else layer.sliding_window_size
    # Layers with a window may have a pool of their own, whose slots are others.
    moved = None
    if window >= 0 and hasattr(pool, "full_to_swa_index_mapping"):
        moved = pool.full_to_swa_index_mapping
    return Options(layer.scaling, cap or 0.0, window, sinks, moved)


def _start(original):
    @wraps(original)
    def __init__(self, model_runner, *args, **kwargs):
        import torch

        from sgl_det.kernels import attention_order

        original(self, model_runner, *args, **kwargs)
        # SGLang's memory for one partial result per 256 tokens is not used.
        self.max_kv_splits = 1
        device = torch.device(self.device)
        self.sgl_det_order = order = attention_order.own(self.v_head_dim, device)
        sizes = (self.num_head, self.num_kv_head, self.v_head_dim, self.max_context_len)
        self.sgl_det_work = decode_programs.work_for(*sizes, order, device)
        _prove(self, model_runner)

    return __init__


def _prove(backend: Any, model_runner: Any) -> None:
    """Raise RuntimeError unless prompts, chunks and decode give the same bits here."""
    from sgl_det.kernels import proof
    from sgl_det.kernels.attention import Options
    from sgl_det.kernels.attention_proof import Heads, first_mismatch

    sizes = (backend.num_head, backend.num_kv_head, backend.v_head_dim)
    heads = Heads(queries=sizes[0], keys=sizes[1], d=sizes[2], dtype=model_runner.dtype)
    config = model_runner.model_config.hf_text_config
    cap = getattr(config, "attn_logit_softcapping", None) or 0.0
    windows = {-1, -1 if backend.sliding_window_size is None else backend.sliding_window_size}
    asked = [Options(sizes[2] ** -0.5, cap, window) for window in sorted(windows)]
    with proof.timed():
        found = next(filter(None, (first_mismatch(heads, options) for options in asked)), "")
    if found:
        raise RuntimeError(
            f"attention of {sizes[0]} heads of {sizes[2]} does not have one order on this GPU: "
            f"{found}; expected equal bits; take another attention backend, and report it"
        )
    name = f"attention {sizes[0]}/{sizes[1]} heads of {sizes[2]}"
    proof.PROVEN.setdefault("rows", {})[name] = "sgl_det"


_TABLE: tuple[tuple[str, str, str, str, Callable, str], ...] = (
    (
        "extend",
        f"{_BACKEND}._forward_extend_unified",
        "73450bca55ca",
        "prompts, chunks and what follows a cached prefix take the keys in decode's order",
        _extend,
        "none: SGLang has no seam for an attention kernel",
    ),
    (
        "decode",
        f"{_BACKEND}.forward_decode",
        "3e56387e8551",
        "decode takes the keys in prefill's order, spread over the GPU as the load asks",
        _decode,
        "none: SGLang has no seam for an attention kernel",
    ),
    (
        "start",
        f"{_BACKEND}.__init__",
        "7f90e56b7610",
        "the order is proven on this GPU; SGLang's memory for partial results is not taken",
        _start,
        "none: SGLang proves nothing",
    ),
)


def patches() -> tuple[Patch, ...]:
    """The patches of a scheduler process that runs the Triton backend."""
    return (*patches_of("triton", _TABLE), *chunks.patches())
