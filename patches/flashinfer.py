"""FlashInfer in one order: prefill, chunked prefill, extend after a prefix hit, and decode.

SGLang's deterministic mode splits the KV of prefill and of decode at different places, lets the
query tile follow the mean length of the batch, and then switches the radix cache off and aligns
chunks to 4096 tokens, since neither would hold. With one kernel, one KV tile and one split size at
absolute positions, none of that is needed.
"""

from __future__ import annotations

from functools import cache, wraps
from types import SimpleNamespace
from typing import Any

from sgl_det.patch import Patch
from sgl_det.patches import chunks, phases
from sgl_det.patches.table import patches_of

_FLASHINFER = "flashinfer-python>=0.6.15,<0.6.16"


def _module(original):
    @cache
    def ours(backend, *args):
        from sgl_det.kernels.flashinfer_module import module_plan

        return SimpleNamespace(**vars(original(backend, *args)) | {"plan": module_plan})

    @wraps(original)
    def get_batch_prefill_module(backend, *args):
        return ours(backend, *args) if backend == "fa2" else original(backend, *args)

    return get_batch_prefill_module


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


def _backend(original):
    @wraps(original)
    def __init__(self, model_runner, *args, **kwargs):
        from sgl_det.kernels.flashinfer_module import SETTINGS, Order
        from sgl_det.kernels.flashinfer_order import SPLIT

        SETTINGS.order = Order(
            chunk=SPLIT,
            context=model_runner.model_config.context_len,
            pool=model_runner.max_total_num_tokens,
        )
        _reserve(model_runner, SETTINGS.order)
        original(self, model_runner, *args, **kwargs)
        prove(self, model_runner)

    return __init__


def prove(backend: Any, model_runner: Any) -> None:
    """Raise RuntimeError unless prompts, chunks and decode give the same bits here."""
    import torch

    from sgl_det.kernels.attention_order import arch_of
    from sgl_det.kernels.flashinfer_order import reduction_order

    d, arch = model_runner.model_config.head_dim, arch_of(torch.device("cuda"))
    order = reduction_order(d=d, dtype=model_runner.dtype, arch=arch)
    phases.prove(lambda step: attend(backend, step), model_runner, order)


def attend(backend: Any, step: Any) -> Any:
    """A step of the proof, by the wrappers that serve."""
    from itertools import accumulate

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


def _reserve(model_runner: Any, order: Any) -> None:
    """The workspace that SGLang would allocate with a fixed size, in the size that is needed."""
    import torch
    from sglang.srt.runtime_context import get_buffer, get_parallel

    from sgl_det.kernels.flashinfer_module import workspace_needed
    from sgl_det.kernels.flashinfer_plan import Heads

    model, args, shards = model_runner.model_config, model_runner.server_args, get_parallel()
    heads = Heads(
        qo=model.get_max_num_attention_heads() // shards.attn_tp_size,
        kv=model.get_num_kv_heads(shards.attn_tp_size),
        dim=model.head_dim,
    )
    chunked = args.chunked_prefill_size
    rows = chunked if chunked and chunked > 0 else max(args.max_prefill_tokens, order.context)
    size = workspace_needed(order, rows, heads, model_runner.req_to_token_pool.size)
    allocate = {"dtype": torch.uint8, "device": model_runner.device}
    get_buffer("flashinfer_workspace", lambda: torch.empty(size, **allocate))


def _graph(original):
    @wraps(original)
    def can_run_graph(self, forward_batch):
        from sgl_det.kernels.flashinfer_module import fits

        if not original(self, forward_batch):
            return False
        lengths = forward_batch.seq_lens_cpu
        return fits(forward_batch.seq_lens.cpu() if lengths is None else lengths)

    return can_run_graph


_BACKEND = "sglang.srt.layers.attention.flashinfer_backend:FlashInferAttnBackend"
_RUNNER = "sglang.srt.model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner"
_TABLE = (
    (
        "workspace",
        f"{_BACKEND}.__init__",
        "2c860e5b61d8",
        "the order is set before anything is planned, and the partial results fit",
        _backend,
        "https://github.com/sgl-project/sglang/issues/30244",
    ),
    (
        "graph",
        f"{_RUNNER}.can_run_graph",
        "677c14cc348e",
        "a decode step with more splits than its captured grid runs eagerly, with the same bits",
        _graph,
        "none: SGLang does not split KV in deterministic graphs",
    ),
)


def patches() -> tuple[Patch, ...]:
    """The patches of a scheduler process that runs FlashInfer in one order."""
    return (
        Patch(
            name="flashinfer.plan",
            target="flashinfer.prefill:get_batch_prefill_module",
            requires=_FLASHINFER,
            fingerprints=("556692bf0ba6",),
            why="every phase is planned with one split size, at absolute positions, and a query "
            "tile that no bit depends on",
            upstream="none: FlashInfer's scheduler plans for load",
            wrap=_module,
        ),
        Patch(
            name="flashinfer.headers",
            target="flashinfer.jit.attention.modules:gen_batch_prefill_module",
            requires=_FLASHINFER,
            fingerprints=("aea77ef85633",),
            why="the kernel rescales exactly, and all query tiles share one KV tile",
            upstream="none: FlashInfer promises no bits between query tiles",
            wrap=_headers,
        ),
        *patches_of("flashinfer", _TABLE),
        *chunks.patches(),
    )
