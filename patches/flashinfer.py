"""FlashInfer with one order for prefill, chunks, prefix hits and decode, at any length.

FlashInfer's FA2 kernel takes every batch whose requests have at most `flashinfer_order.SPLIT` keys,
in one pass, built from headers in which no bit depends on the query tile. Longer requests and
decode take our kernels, which have the same bits, and beyond one split an order of their own.
SGLang's deterministic mode splits at other places in prefill than in decode, lets the query tile
follow the mean length of the batch, reserves 2 GiB for partial results, and then switches the radix
cache off and aligns chunks to 4096 tokens.
"""

from __future__ import annotations

from functools import wraps
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from sgl_det.patch import Patch
from sgl_det.patches import chunks, decode_programs, phases
from sgl_det.patches.table import patches_of

_REQUIRES = "flashinfer-python>=0.6.15,<0.6.16"
_ONE_PASS = {"fixed_split_size": None, "disable_split_kv": True}
# One pass leaves no partial results; this is for what FlashInfer may want besides.
_WORKSPACE_BYTES = 128 << 20
_STATE = SimpleNamespace(work=None)


def _headers(original):
    @wraps(original)
    def gen_batch_prefill_module(backend, *args, **kwargs):
        spec = original(backend, *args, **kwargs)
        if backend != "fa2":
            return spec
        from flashinfer.jit import env

        from sgl_det.kernels.flashinfer_headers import patched_copy, with_headers

        copy = patched_copy(env.FLASHINFER_INCLUDE_DIR, env.FLASHINFER_WORKSPACE_DIR)
        return with_headers(spec, copy)

    return gen_batch_prefill_module


def _plan(original):
    @wraps(original)
    def plan(self, *args, **kwargs):
        return original(self, *args, **(kwargs | _ONE_PASS))

    return plan


def _decode_plan(original):
    @wraps(original)
    def call_begin_forward(self, *args, **kwargs):
        return original(self, *args, **(kwargs | _ONE_PASS))

    return call_begin_forward


def _options(given: dict[str, Any], *, causal: bool):
    """What our kernels are told of a call. Raises RuntimeError on what they do not hold."""
    from sgl_det.kernels.attention import Options
    from sgl_det.kernels.flashinfer_order import ORDER

    wanted = {
        "causal": causal,
        "window_left": -1,
        "logits_soft_cap": 0,
        "pos_encoding_mode": "NONE",
    }
    found = {name: given[name] for name in wanted if given.get(name) is not None}
    odd = sorted(name for name, value in found.items() if value != wanted[name])
    odd += sorted(
        name for name in ("k_scale", "v_scale", "q_scale") if given.get(name) not in (None, 1)
    )
    if odd or given.get("sm_scale") is None:
        raise RuntimeError(
            f"FlashInfer was called with {', '.join(odd) or 'no sm_scale'}: no order is held for "
            f"that; take --attention-backend triton"
        )
    return Options(given["sm_scale"], order=ORDER)


def _keys_and_values(cache: Any) -> tuple[Any, Any]:
    """[slots, G, D] each, of pages of one token."""
    k, v = (x.squeeze(1) if x.dim() == 4 else x for x in cache)
    return k, v


def _prefill(original):
    @wraps(original)
    def forward(self, q, paged_kv_cache, **given):
        from sgl_det.kernels.attention import attention
        from sgl_det.kernels.flashinfer_order import SPLIT

        options = _options(given, causal=True)
        if self._max_kv_len <= SPLIT:
            return original(self, q, paged_kv_cache, **given)
        k, v = _keys_and_values(paged_kv_cache)
        keys = self._paged_kv_indptr_buf
        # A table of one row, and where in it each request begins.
        table, begin = self._paged_kv_indices_buf[:, None], keys[:-1]
        return attention(
            q, k, v, table, begin, self._qo_indptr_buf, keys.diff(), self._max_q_len, options
        )

    return forward


def _decode(original):
    @wraps(original)
    def forward(self, q, paged_kv_cache, **given):
        from sgl_det.kernels.attention_decode import decode_attention

        options = _options(given, causal=False)
        k, v = _keys_and_values(paged_kv_cache)
        work, ends = _STATE.work, self._paged_kv_indptr_buf[1 : len(q) + 1]
        shared = decode_programs.shared(work, len(q), k.shape[1], options.order)
        slots = self._paged_kv_indices_buf
        return decode_attention(q, k, v, slots, ends, None, options, work=work, shared=shared)

    return forward


def _start(original):
    @wraps(original)
    def __init__(self, model_runner, *args, **kwargs):
        import torch
        from sglang.srt.runtime_context import get_buffer, get_parallel

        from sgl_det.kernels.attention_order import arch_of
        from sgl_det.kernels.flashinfer_order import ORDER, reduction_order

        device, model = torch.device(model_runner.device), model_runner.model_config
        order = reduction_order(d=model.head_dim, dtype=model_runner.dtype, arch=arch_of(device))
        # SGLang takes what lies under this name already.
        get_buffer(
            "flashinfer_workspace",
            lambda: torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device),
        )
        shards = get_parallel().attn_tp_size
        heads, groups = model.num_attention_heads // shards, model.get_num_kv_heads(shards)
        _STATE.work = decode_programs.work_for(
            heads, groups, model.head_dim, model.context_len, ORDER, device
        )
        original(self, model_runner, *args, **kwargs)
        phases.prove(lambda step: attend(self, step), model_runner, order)

    return __init__


def attend(backend: Any, step: Any) -> Any:
    """A step of the proof, by the wrappers that serve."""
    import torch

    def on_gpu(*values: int) -> Any:
        return torch.tensor(values, dtype=torch.int32, device=step.q.device)

    indices = torch.cat([row[:n] for row, n in zip(step.table, step.lengths, strict=True)])
    keys, pages = on_gpu(0, *accumulate(step.lengths)), on_gpu(*[1] * len(step.lengths))
    sizes = (step.q.shape[1], step.k.shape[2], step.q.shape[2], 1)
    pools, scale = (step.k, step.v), step.q.shape[2] ** -0.5
    if step.decode:
        (wrapper,) = backend.decode_wrappers
        types = {"q_data_type": step.q.dtype, "data_type": step.k.dtype}
        wrapper.begin_forward(keys, indices, pages, *sizes, **types)
        return wrapper.forward(step.q, pools, sm_scale=scale)
    (wrapper,) = backend.prefill_wrappers_paged
    types = {"q_data_type": step.q.dtype, "kv_data_type": step.k.dtype}
    rows = on_gpu(0, *accumulate(step.new))
    wrapper.begin_forward(rows, keys, indices, pages, *sizes, causal=True, **types)
    return wrapper.forward(step.q, pools, causal=True, sm_scale=scale)


_BACKEND = "sglang.srt.layers.attention.flashinfer_backend"
_TABLE = (
    (
        "start",
        f"{_BACKEND}:FlashInferAttnBackend.__init__",
        "2c860e5b61d8",
        "the phases are proven to have one order; no memory is kept for partial results",
        _start,
        "https://github.com/sgl-project/sglang/issues/30244",
    ),
    (
        "decode_plan",
        f"{_BACKEND}:FlashInferIndicesUpdaterDecode.call_begin_forward",
        "2f8a4ee39ad1",
        "what is planned for decode needs no workspace, since our kernel decodes",
        _decode_plan,
        "none: graph and eager decode differ beyond 2048 tokens in SGLang",
    ),
)


def _patch(name: str, target: str, fingerprint: str, why: str, wrap: Any) -> Patch:
    return Patch(
        name=f"flashinfer.{name}",
        target=f"flashinfer.{target}",
        requires=_REQUIRES,
        fingerprints=(fingerprint,),
        why=why,
        upstream="none: FlashInfer promises no bits between query tiles, splits and phases",
        wrap=wrap,
    )


def patches() -> tuple[Patch, ...]:
    """The patches of a scheduler process that runs FlashInfer in one order."""
    prefill = "prefill:BatchPrefillWithPagedKVCacheWrapper"
    return (
        _patch(
            "headers",
            "jit.attention.modules:gen_batch_prefill_module",
            "aea77ef85633",
            "the kernel rescales exactly, and all query tiles share one KV tile",
            _headers,
        ),
        _patch(
            "plan",
            f"{prefill}.plan",
            "e0c766fd6ff5",
            "prefill takes the KV of a request in one pass, and needs no workspace to overflow",
            _plan,
        ),
        _patch(
            "prefill",
            f"{prefill}.forward",
            "9a32ceab3366",
            "requests of more than one split take our kernel, in the order of decode",
            _prefill,
        ),
        _patch(
            "decode",
            "decode:BatchDecodeWithPagedKVCacheWrapper.forward",
            "947f81b8fee1",
            "our kernel decodes in prefill's order, spread over the GPU as the load asks",
            _decode,
        ),
        *patches_of("flashinfer", _TABLE),
        *chunks.patches(),
    )
