"""Times of FlashInfer with our plans and its own, for `check_flashinfer.py`.

No time stands alone: what the graphs of our arms wrote is compared with a reference, bit by bit,
and a kernel with an order of its own is timed only if it is near to that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import torch
from build_flashinfer import fa2_module
from flashinfer_calls import CONTEXT, POOL, QWEN, Call, Pool, differing, floats, indptr
from graph_timing import Arm, in_turn

from sgl_det.kernels import flashinfer_headers as headers
from sgl_det.kernels import flashinfer_module
from sgl_det.kernels.flashinfer_plan import ONE_PASS, decode_capture, decode_splits

SPLIT, REFERENCE_TILE = 1024, 64
NEAR = 0.2  # between two orders: several roundings of averages of values of standard deviation 1
BEYOND_L2, MOST_BATCHES = 200_000_000, 64
DECODE = [(b, n) for n in (512, 2048, 8192, 32768) for b in (1, 4, 16, 64, 256)]
PREFILL = ((8, 1024), (2, 4096), (1, 16384))

Expected = Callable[[int], torch.Tensor]  # of a split, the rows of all batches


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


def reference(module, pool: Pool, batches, chunk: int) -> torch.Tensor:
    """[tokens, H, D] of all batches, by a plan with that split and no graph."""
    how = {"tile": REFERENCE_TILE, "chunk": chunk}
    return torch.cat([Call(module, pool, spans, **how)() for spans in batches])


def ours(name: str, module, pool: Pool, batches, expected: Expected, **how) -> Arm:
    """Our plan. The outputs are emptied after the capture: what is compared is of a replay."""
    calls = [Call(module, pool, spans, **how) for spans in batches]
    made = Arm(name, calls, partial(wrong_rows, calls, expected, how["chunk"]))
    for call in calls:
        call.o.fill_(float("nan"))
    return made


def wrong_rows(calls: list[Call], expected: Expected, chunk: int) -> int:
    """Rows of all batches that are not those of the reference."""
    return differing(torch.cat([call.o for call in calls]), expected(chunk))


def stock(name: str, module, captured: bool, pool: Pool, batches, expected: Expected) -> Arm:
    """FlashInfer's own plan and kernel; ``captured`` as a server's decode is."""
    how = {"causal": not captured, "own": partial(heuristic, module, captured)}
    return other_order(name, [Call(module, pool, spans, **how) for spans in batches], expected)


def other_order(name: str, calls: list[Callable], expected: Expected) -> Arm:
    """An arm whose bits are its own. Raises ValueError where it is not even near to ours."""
    found = calls[-1]()
    far = (found.float() - expected(SPLIT)[-len(found) :].float()).abs().max().item()
    if not far <= NEAR:  # NaN is not, either
        raise ValueError(f"found an error of {far}, expected at most {NEAR}")
    return Arm(name, calls, lambda: None)


def operands(batch: int, n: int, queries: int) -> tuple[Pool, list[list[tuple[int, int, int]]]]:
    """As many batches as exceed the L2 cache, as the layers of a model do."""
    size = batch * n * QWEN.kv * QWEN.dim * 4
    count = max(1, min(MOST_BATCHES, BEYOND_L2 // size))
    ids = torch.arange(count * batch).view(count, batch).tolist()
    pool = Pool(QWEN, count * batch, n, queries)
    return pool, [[(r, n - queries, n) for r in some] for some in ids]


def decode(emit) -> None:
    for batch, n in DECODE:
        emit({"part": "decode", "m": batch, "n": n, **in_turn(decode_arms(batch, n))})
        torch.cuda.empty_cache()


def decode_arms(batch: int, n: int) -> dict[str, Callable[[], Arm]]:
    """The reference decodes the requests of all batches at once."""
    pool, batches = operands(batch, n, 1)
    module, name = fa2_module(128, headers.EDITS), "flashinfer"
    expected = cache(partial(reference, module, pool, [sum(batches, [])]))
    make = {name: partial(stock, name, fa2_module(128, ()), True, pool, batches, expected)}
    for tile, chunk in ((16, 256), (16, 512), (16, 1024), (16, 2048), (64, 512), (64, 1024)):
        splits = decode_splits(batch, chunk, context=CONTEXT, pool=max(POOL, batch * n))
        sizes = decode_capture(batch, QWEN, tile, splits)
        how = {"tile": tile, "chunk": chunk, "causal": False, "sizes": sizes}
        name = f"tile {tile}, split {chunk}"
        make[name] = partial(ours, name, module, pool, batches, expected, **how)
    return make


def automatic(name: str, pool: Pool, batches, expected: Expected) -> Arm:
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
    return other_order(name, calls, expected)


def prefill(emit) -> None:
    for batch, n in PREFILL:
        emit({"part": "prefill", "m": batch, "n": n, **in_turn(prefill_arms(batch, n))})
        torch.cuda.empty_cache()


def prefill_arms(batch: int, n: int) -> dict[str, Callable[[], Arm]]:
    """Two batches take turns; the partial results of both at once would not fit."""
    pool, batches = operands(batch, n, n)
    batches, module, name = batches[:2], fa2_module(128, headers.EDITS), "flashinfer fa2"
    expected = cache(partial(reference, module, pool, batches))
    make = {
        name: partial(stock, name, fa2_module(128, ()), False, pool, batches, expected),
        "auto": partial(automatic, "auto", pool, batches, expected),
    }
    for tile, chunk in ((128, 512), (128, 1024), (128, 2048), (128, ONE_PASS), (64, 1024)):
        name = f"tile {tile}, split {'none' if chunk == ONE_PASS else chunk}"
        how = {"tile": tile, "chunk": chunk}
        make[name] = partial(ours, name, module, pool, batches, expected, **how)
    return make
