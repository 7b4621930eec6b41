"""Times of FlashInfer with our plans and its own, for `check_flashinfer.py`."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import torch
from build_flashinfer import fa2_module
from flashinfer_calls import CONTEXT, POOL, QWEN, Call, Pool, floats, indptr
from graph_timing import Arm, in_turn

from sgl_det.kernels import flashinfer_headers as headers
from sgl_det.kernels import flashinfer_module
from sgl_det.kernels.flashinfer_plan import ONE_PASS, decode_capture, decode_splits

SPLIT = 1024
DECODE = [(b, n) for n in (512, 2048, 8192, 32768) for b in (1, 4, 16, 64, 256)]
PREFILL = ((8, 1024), (2, 4096), (1, 16384))


def host(emit) -> None:
    """Microseconds of one plan on the host, its copy to the GPU included."""
    order = flashinfer_module.Order(chunk=SPLIT, context=CONTEXT, pool=POOL)
    flashinfer_module.SETTINGS.order = order
    ints = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(8 << 20, dtype=torch.uint8, pin_memory=True)
    for batch in (1, 16, 64, 256):
        kv = torch.from_numpy(indptr([POOL // 2 // batch % CONTEXT + 1] * batch))
        qo, numbers = torch.arange(batch + 1, dtype=torch.int32), (QWEN.qo, QWEN.kv, 1, True)
        rest = (batch, batch, *numbers, QWEN.dim, QWEN.dim, False, -1, -1, False, 0)
        tensors = (floats(), ints, pinned, qo, kv, kv)
        times = {}
        arms = {"ours": flashinfer_module.module_plan, "flashinfer": fa2_module(128, ()).plan}
        for name, call in arms.items():
            for _ in range(20):
                call(*tensors, *rest)
            start = time.perf_counter()
            for _ in range(200):
                call(*tensors, *rest)
            times[name] = round((time.perf_counter() - start) * 5e3, 1)
        emit({"part": "host", "m": batch, "us": times})


def heuristic(module, captured: bool, qo: np.ndarray, kv: np.ndarray):
    """FlashInfer's own plan, as SGLang's normal mode asks for it, and its integer workspace."""
    ints = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(8 << 20, dtype=torch.uint8, pin_memory=True)
    tensors = (torch.from_numpy(a) for a in (qo, kv, np.diff(kv)))
    numbers = (int(qo[-1]), len(qo) - 1, QWEN.qo, QWEN.kv, 1, captured, QWEN.dim, QWEN.dim)
    vector = module.plan(floats(), ints, pinned, *tensors, *numbers, not captured, -1, -1, False, 0)
    torch.cuda.synchronize()  # the pinned memory ends here
    return vector, ints


def arm(name: str, module, pool: Pool, batches, **how) -> Arm:
    return Arm(name, [Call(module, pool, spans, **how) for spans in batches], lambda: 0)


def operands(batch: int, n: int, queries: int) -> tuple[Pool, list[list[tuple[int, int, int]]]]:
    """As many batches as exceed the L2 cache, as the layers of a model do."""
    count = max(1, min(64, 200_000_000 // (batch * n * QWEN.kv * QWEN.dim * 4)))
    ids = torch.arange(count * batch).view(count, batch).tolist()
    pool = Pool(QWEN, count * batch, n, queries)
    return pool, [[(r, n - queries, n) for r in some] for some in ids]


def decode(emit) -> None:
    ours, stock = fa2_module(128, headers.EDITS), fa2_module(128, ())
    for batch, n in DECODE:
        pool, batches = operands(batch, n, 1)
        own = {"causal": False, "own": partial(heuristic, stock, True)}
        make = {"flashinfer": partial(arm, "flashinfer", stock, pool, batches, **own)}
        for tile, chunk in ((16, 256), (16, 512), (16, 1024), (16, 2048), (64, 512), (64, 1024)):
            splits = decode_splits(batch, chunk, context=CONTEXT, pool=max(POOL, batch * n))
            sizes = decode_capture(batch, QWEN, tile, splits)
            how = {"tile": tile, "chunk": chunk, "causal": False, "sizes": sizes}
            name = f"tile {tile}, split {chunk}"
            make[name] = partial(arm, name, ours, pool, batches, **how)
        emit({"part": "decode", "m": batch, "n": n, **in_turn(make)})
        del pool, make
        torch.cuda.empty_cache()


def automatic(pool: Pool, batches) -> Arm:
    """FlashInfer's `auto` backend, on Hopper its FA3; not compiled here, which takes minutes."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper
    from flashinfer.jit import core, gen_batch_prefill_module

    types = (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int32)
    spec = gen_batch_prefill_module("fa3", *types, 128, 128, 0, False, False, False)
    if not spec.jit_library_path.exists():
        raise RuntimeError("the FA3 module is not compiled: run a FlashInfer server before")
    core.JitSpec.build = lambda *_, **__: None
    calls = []
    for spans in batches:
        scratch = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        wrapper = BatchPrefillWithPagedKVCacheWrapper(scratch, "NHD", backend="auto")
        qo, kv = indptr([e - f for _, f, e in spans]), indptr([e for *_, e in spans])
        indices = torch.cat([pool.table[r, :e] for r, _, e in spans])
        last = torch.ones(len(spans), dtype=torch.int32)
        tensors = (torch.from_numpy(qo), torch.from_numpy(kv), indices, last)
        numbers = (QWEN.qo, QWEN.kv, QWEN.dim, 1)
        wrapper.plan(*tensors, *numbers, causal=True, q_data_type=torch.bfloat16)
        q = torch.cat([pool.q[r, f:e] for r, f, e in spans])
        calls.append(partial(wrapper.run, q, (pool.k, pool.v)))
    return Arm("auto", calls, lambda: 0)


def prefill(emit) -> None:
    ours, stock = fa2_module(128, headers.EDITS), fa2_module(128, ())
    for batch, n in PREFILL:
        pool, batches = operands(batch, n, n)
        batches = batches[:2]
        own = {"own": partial(heuristic, stock, False)}
        make = {
            "flashinfer fa2": partial(arm, "flashinfer fa2", stock, pool, batches, **own),
            "auto": partial(automatic, pool, batches),
        }
        for tile, chunk in ((128, 512), (128, 1024), (128, 2048), (128, ONE_PASS), (64, 1024)):
            name = f"tile {tile}, split {'none' if chunk == ONE_PASS else chunk}"
            make[name] = partial(arm, name, ours, pool, batches, tile=tile, chunk=chunk)
        emit({"part": "prefill", "m": batch, "n": n, **in_turn(make)})
        del pool, make
        torch.cuda.empty_cache()
