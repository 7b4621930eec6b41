"""FlashInfer's own wrappers, with our plan call and a kernel emulated in numpy, on the CPU.

Everything in between is FlashInfer's Python: its arguments, its buffers, its two ways to plan
decode. Skipped where FlashInfer cannot be imported.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from sgl_det.kernels import flashinfer_module
from sgl_det.patches import flashinfer as our_patches
from sgl_det.testing import assert_bitwise_equal

from .flashinfer_emulator import Emulator

BF16, REQUESTS, LENGTH = torch.bfloat16, 3, 300
HEADS = (4, 1, 64)
STEPS = [(0, 0), (1, 127), (2, 128), (0, 299), (1, 255), (2, 256)]


class Module:
    """What FlashInfer gets from its compiler; it plans nothing, so that only ours can."""

    ragged_run = plan = None

    def build_and_load(self):
        return self

    def paged_run(self, *args):
        custom_mask, mask_indptr, alibi, *none = args[16:24]
        assert custom_mask is None and mask_indptr is None and none == [None] * 5
        Emulator().paged_run(*args[:18], None, *args[19:])


@pytest.fixture
def flashinfer(monkeypatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    prefill = pytest.importorskip("flashinfer.prefill", exc_type=ImportError)
    decode = pytest.importorskip("flashinfer.decode", exc_type=ImportError)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(prefill, "gen_batch_prefill_module", lambda *args: Module())
    prefill.get_batch_prefill_module.cache_clear()
    ours = our_patches._module(prefill.get_batch_prefill_module)
    for module in (prefill, decode):
        monkeypatch.setattr(module, "device_support_pdl", lambda device: True)
        monkeypatch.setattr(module, "get_batch_prefill_module", ours)
    order = flashinfer_module.Order(chunk=128, context=512, pool=2000)
    monkeypatch.setattr(flashinfer_module, "SETTINGS", flashinfer_module.Settings(order=order))
    yield SimpleNamespace(prefill=prefill, decode=decode)
    monkeypatch.undo()
    prefill.get_batch_prefill_module.cache_clear()


class Model:
    """Keys and queries, and both of FlashInfer's wrappers over them."""

    def __init__(self, flashinfer):
        source, (qo, kv, dim) = torch.Generator().manual_seed(0), HEADS
        make = lambda *shape: torch.randn(shape, generator=source).to(BF16)  # noqa: E731
        self.kv = make(REQUESTS * LENGTH, 1, kv, dim), make(REQUESTS * LENGTH, 1, kv, dim)
        self.q = make(REQUESTS, LENGTH, qo, dim)
        slots = torch.randperm(REQUESTS * LENGTH, generator=source)
        self.table = slots.int().view(REQUESTS, LENGTH)
        self.workspace = torch.zeros(1 << 24, dtype=torch.uint8)
        self.flashinfer = flashinfer

    def _arrays(self, spans):
        lengths = [[0, *(end - first for _, first, end in spans)], [0, *(e for *_, e in spans)]]
        qo, kv = (torch.tensor(x).cumsum(0).int() for x in lengths)
        pages = torch.cat([self.table[r, :end] for r, _, end in spans])
        return qo, kv, pages, torch.ones(len(spans), dtype=torch.int32)

    def rows(self, spans, of=None):
        return torch.cat([(self.q if of is None else of)[r, f:e] for r, f, e in spans])

    def prefill(self, spans, graph=False):
        qo, kv, pages, last = self._arrays(spans)
        buffers = [torch.zeros_like(x) for x in (qo, kv, pages, last)]
        names = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        named = {f"{n}_buf": b for n, b in zip(names, buffers, strict=True)} if graph else {}
        wrapper = self.flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper(
            self.workspace, "NHD", backend="fa2", use_cuda_graph=graph, **named
        )
        options = {"q_data_type": BF16, "kv_data_type": BF16, "fixed_split_size": 4096}
        wrapper.begin_forward(qo, kv, pages, last, *HEADS, 1, **options)
        return wrapper.forward(self.rows(spans), self.kv, causal=True, sm_scale=0.125)

    def decode(self, spans, graph=False):
        _, kv, pages, last = self._arrays(spans)
        buffers = [torch.zeros_like(x) for x in (kv, pages, last)]
        names = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        named = {f"{n}_buffer": b for n, b in zip(names, buffers, strict=True)} if graph else {}
        wrapper = self.flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper(
            self.workspace, "NHD", graph, use_tensor_cores=True, backend="fa2", **named
        )
        args = (kv, pages, last, *HEADS, 1)
        wrapper.begin_forward(*args, data_type=BF16, q_data_type=BF16, disable_split_kv=graph)
        if graph:
            planned = list(wrapper._plan_info)
            fast = self.flashinfer.decode.fast_decode_plan
            fast(wrapper, *args, data_type=BF16, q_data_type=BF16, global_override_indptr_cpu=kv)
            assert wrapper._plan_info == planned
        return wrapper.forward(self.rows(spans), self.kv, sm_scale=0.125)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_chunks_and_decode_have_the_bits_of_one_prefill(flashinfer, graph):
    model = Model(flashinfer)
    whole = model.prefill([(r, 0, LENGTH) for r in range(REQUESTS)]).view_as(model.q)
    chunks = [(0, 37, 200), (1, 128, 129), (2, 1, LENGTH)]
    assert_bitwise_equal(model.prefill(chunks, graph), model.rows(chunks, whole), "chunks")
    steps = [(r, p, p + 1) for r, p in STEPS]
    assert_bitwise_equal(model.decode(steps, graph), model.rows(steps, whole), "decode")
