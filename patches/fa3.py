"""FA3 with one order for prefill, chunks, prefix hits and decode, in CUDA graphs and without.

What is planned once a forward (`sgl_det.kernels.fa3_chunks`) is kept on the tensor of the lengths,
which every layer hands to FA3, so the one function that calls FA3 finds it there. Requests of at
most one chunk take SGLang's own call. Few requests leave FA3 most of the GPU idle in decode: there
`sgl_det.kernels.fa3_decode` gives its bits. For decode graphs see `fa3_graphs`.
"""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

from sgl_det.patch import Patch
from sgl_det.patches.table import patches_of

# No request of the forward has more than one chunk.
WHOLE = "whole"
PLAN, CHUNKED = "sgl_det_plan", "sgl_det_chunked"
# Arguments by which a call of FA3 is something else than attention over a pool of one-token pages.
_FOREIGN = (
    *("k", "v", "qv", "q_descale", "k_descale", "v_descale", "cache_batch_idx", "cache_leftpad"),
    *("rotary_cos", "attention_chunk", "score_mod", "rel_bias", "return_softmax_lse"),
)


def _call(original):
    from sgl_det.kernels import fa3_chunks as fa3
    from sgl_det.kernels import fa3_decode, fa3_extend

    @wraps(original)
    def flash_attn_with_kvcache(q, k_cache, v_cache, **given):
        plan = getattr(given.get("cache_seqlens"), PLAN, None)
        _check_call(plan, q, k_cache, given)
        told = partial(fa3.told_longest, q.shape[-1], q.shape[1] // k_cache.shape[2])
        ends = {"sinks": given.get("sinks"), "out": given.get("out")}

        def one(q, s, out):
            own = {"page_table": s.table, "cache_seqlens": s.lengths, "cu_seqlens_q": s.starts}
            own |= {"max_seqlen_q": told(s.longest), "causal": s.causal, "out": out}
            own |= {"return_softmax_lse": True, "num_splits": 1, "sinks": None}
            own |= {"scheduler_metadata": None, "cu_seqlens_k_new": None}
            o, lse, *_ = original(q, k_cache, v_cache, **given | own)
            return o, lse

        if isinstance(plan, fa3_decode.Few):
            table, lengths = given["page_table"], given["cache_seqlens"]
            if not given.get("softcap"):
                pools, where = (k_cache.squeeze(1), v_cache.squeeze(1)), (table, lengths)
                scale = given["softmax_scale"]
                return fa3_decode.decode_attention(q, *pools, *where, plan.chunks, scale, **ends)
            chunk, capacity = fa3.CHUNKS[q.shape[-1]], len(q) * plan.chunks
            plan = fa3.plan_decode(lengths, table, chunk, capacity)
        if isinstance(plan, fa3.Chunked):
            return fa3.decode_attention(one, q, plan, **ends)
        if isinstance(plan, fa3_extend.Extend):
            return fa3_extend.extend_attention(one, q, plan, **ends)[0]
        if ends["sinks"] is None:
            pinned = {"max_seqlen_q": told(given["max_seqlen_q"]), "num_splits": 1}
            return original(q, k_cache, v_cache, **given | pinned)
        names = ("page_table", "cache_seqlens", "cu_seqlens_q", "max_seqlen_q")
        whole = fa3.Sequences(*(given[name] for name in names), causal=True)
        return fa3_extend.extend_attention(one, q, fa3_extend.Extend(whole, ()), **ends)[0]

    return flash_attn_with_kvcache


def _check_call(plan: Any, q: Any, k_cache: Any, given: dict[str, Any]) -> None:
    """Raise RuntimeError on a call that has no plan, or that the plan does not hold for."""
    foreign = sorted(n for n in _FOREIGN if given.get(n) is not None and given[n] is not False)
    window = tuple(given.get("window_size", (-1, -1)))
    problem = (
        "these lengths were not planned"
        if plan is None
        else f"{', '.join(foreign)} given"
        if foreign
        else f"queries in {q.dtype}"
        if q.element_size() != 2
        else f"a window of {window}"
        if window != (-1, -1)
        else f"pages of {k_cache.shape[1]} tokens"
        if k_cache.shape[1] != 1
        else "attention that is not causal"
        if not given.get("causal")
        else f"version {given['ver']}"
        if given.get("ver", 3) != 3
        else None
    )
    if problem:
        raise RuntimeError(f"FA3 was called with {problem}: no order is held for that")


def _check_backend(backend: Any, forward_batch: Any) -> None:
    """Raise ValueError on a model or a forward of which the order is not held."""
    from sgl_det.kernels.fa3_chunks import TILES

    mode = forward_batch.forward_mode
    for found, what in (
        (backend.head_dim not in TILES, f"heads of {backend.head_dim}, not of {tuple(TILES)}"),
        (backend.page_size != 1, f"pages of {backend.page_size} tokens, not of 1"),
        (backend.use_mla, "latent attention"),
        (backend.has_swa, "sliding windows"),
        (backend.has_local_attention, "local attention"),
        (backend.is_encoder_decoder, "an encoder"),
        (backend.fa_impl_ver != 3, f"FA{backend.fa_impl_ver}"),
        (forward_batch.spec_info is not None, "speculative decoding"),
        (mode.is_target_verify() or mode.is_dllm_extend(), f"the mode {mode}"),
    ):
        if found:
            raise ValueError(f"FA3 has no order for {what}: take --attention-backend triton")


def _eager_plan(backend: Any, forward_batch: Any) -> Any:
    """The plan of a forward whose lengths the host knows, or asks for."""
    from sgl_det.kernels.fa3_chunks import CHUNKS

    metadata, chunk = backend.forward_metadata, CHUNKS[backend.head_dim]
    if forward_batch.forward_mode.is_decode_or_idle():
        known = forward_batch.seq_lens_cpu
        lengths = (forward_batch.seq_lens if known is None else known).tolist()
        on_gpu, table = metadata.cache_seqlens_int32, metadata.page_table
        return decode_plan(lengths, on_gpu, table, _heads(backend))
    prefix = [int(n) for n in forward_batch.extend_prefix_lens_cpu]
    new = [int(n) for n in forward_batch.extend_seq_lens_cpu]
    return extend_plan(prefix, new, metadata.page_table, chunk)


def _heads(backend: Any) -> Any:
    from sgl_det.kernels.attention_proof import Heads

    return Heads(
        queries=backend.num_attention_heads,
        keys=backend.num_kv_heads,
        d=backend.head_dim,
        dtype=backend.kv_cache_dtype,
    )


def decode_plan(lengths: list[int], on_gpu: Any, table: Any, heads: Any) -> Any:
    """Of a step of decode; the lengths [B] are known to the host, and lie ``on_gpu``."""
    from sgl_det.kernels.fa3_chunks import CHUNKS, chunks_of, plan_decode
    from sgl_det.kernels.fa3_decode import plan_few

    longest, chunk = max(lengths, default=0), CHUNKS[heads.d]
    few = plan_few(on_gpu, longest, heads)
    if few or longest <= chunk:
        return few or WHOLE
    return plan_decode(on_gpu, table, chunk, sum(chunks_of(n, chunk) for n in lengths))


def extend_plan(prefix: list[int], new: list[int], table: Any, chunk: int) -> Any:
    """Of ``new`` tokens of each request after ``prefix`` keys."""
    from sgl_det.kernels.fa3_extend import plan_extend

    if max((p + n for p, n in zip(prefix, new, strict=True)), default=0) <= chunk:
        return WHOLE
    return plan_extend(prefix, new, table, chunk)


def _eager(original):
    @wraps(original)
    def init_forward_metadata(self, forward_batch):
        original(self, forward_batch)
        _check_backend(self, forward_batch)
        plan = _eager_plan(self, forward_batch)
        setattr(self.forward_metadata.cache_seqlens_int32, PLAN, plan)

    return init_forward_metadata


def _in_graph(original):
    from sgl_det.kernels import fa3_chunks as fa3
    from sgl_det.kernels.fa3_decode import plan_few

    @wraps(original)
    def init_forward_metadata_in_graph(self, forward_batch):
        original(self, forward_batch)
        _check_backend(self, forward_batch)
        if not forward_batch.forward_mode.is_decode_or_idle():
            return
        metadata, chunk = self.forward_metadata, fa3.CHUNKS[self.head_dim]
        lengths, table = metadata.cache_seqlens_int32, metadata.page_table
        chunked = getattr(self, CHUNKED, False)
        # No request has more keys than the pool.
        most = min(self.max_context_len, self.token_to_kv_pool.size)
        longest = most if chunked else chunk
        plan = plan_few(lengths, longest, _heads(self)) or WHOLE
        if chunked and plan is WHOLE:
            capacity = len(lengths) * fa3.chunks_of(longest, chunk)
            capacity = min(capacity, len(lengths) + more_chunks(self))
            plan = fa3.plan_decode(lengths, table, chunk, capacity)
        setattr(lengths, PLAN, plan)

    return init_forward_metadata_in_graph


def more_chunks(backend: Any) -> int:
    """Chunks beyond the first of each request that a graph holds: a pool full of unshared keys."""
    from sgl_det.kernels.fa3_chunks import CHUNKS

    return backend.token_to_kv_pool.size // CHUNKS[backend.head_dim]


def _metadata(original):
    from sgl_det.kernels.fa3_chunks import told_longest

    @wraps(original)
    def _compute_scheduler_metadata(self, *lengths):
        make = self._get_scheduler_metadata
        if getattr(self, CHUNKED, False) or make is None:
            return None
        told = told_longest(self.head_dim, self.num_attention_heads // self.num_kv_heads, 1)
        self._get_scheduler_metadata = lambda **given: make(**given | {"max_seqlen_q": told})
        try:
            return original(self, *lengths)
        finally:
            self._get_scheduler_metadata = make

    return _compute_scheduler_metadata


_BACKEND = "sglang.srt.layers.attention.flashattention_backend:FlashAttentionBackend"
_TABLE = (
    (
        "call",
        "sglang.kernels.ops.attention.flash_attention:flash_attn_with_kvcache",
        "88ca953c7515",
        "one KV tile in every call, and the keys in chunks of one size, merged in ascending order",
        _call,
    ),
    (
        "plan",
        f"{_BACKEND}.init_forward_metadata",
        "40e523c3ef74",
        "the chunks of a forward without a graph, cut at the same absolute positions",
        _eager,
    ),
    (
        "plan_in_graph",
        f"{_BACKEND}.init_forward_metadata_in_graph",
        "9dfb2417b86f",
        "the same chunks in a decode graph, made anew at each replay",
        _in_graph,
    ),
    (
        "scheduler_metadata",
        f"{_BACKEND}._compute_scheduler_metadata",
        "bbbb205964b9",
        "FA3's schedule is made for the KV tile that the call takes",
        _metadata,
    ),
)


def patches() -> tuple[Patch, ...]:
    """The patches of a scheduler process that runs FA3."""
    return patches_of("fa3", _TABLE, "https://github.com/sgl-project/sglang/issues/22819")
