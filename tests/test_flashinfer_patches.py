"""FlashInfer's patches for one order: what is replaced, on stand-ins; and that they fit."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from sgl_det.check import FITS, judge_all
from sgl_det.kernels import flashinfer_module, flashinfer_order, flashinfer_plan
from sgl_det.patches import chunks, flashinfer


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    order = flashinfer_module.Order(chunk=1024, context=8192, pool=4096)
    monkeypatch.setattr(flashinfer_module, "SETTINGS", flashinfer_module.Settings(order=order))
    return flashinfer_module.SETTINGS


def test_patches_fit_what_is_installed():
    assert [v for v in judge_all(flashinfer.patches()) if v.verdict != FITS] == []


def test_plan_is_replaced_for_fa2_alone():
    made = {b: SimpleNamespace(plan="theirs", paged_run=f"run {b}") for b in ("fa2", "fa3")}
    ours = flashinfer._module(lambda backend, *args: made[backend])
    assert ours("fa3", 1) is made["fa3"]
    module = ours("fa2", 1)
    assert module.plan is flashinfer_module.module_plan and module.paged_run == "run fa2"
    assert ours("fa2", 1) is module and made["fa2"].plan == "theirs"


@dataclass
class Spec:
    name: str
    extra_include_dirs: list[Path] | None = None


def test_only_fa2_is_built_from_the_copy(monkeypatch, tmp_path):
    env = SimpleNamespace(FLASHINFER_INCLUDE_DIR=tmp_path, FLASHINFER_WORKSPACE_DIR=tmp_path)
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    jit = ModuleType("flashinfer.jit")
    jit.env = env
    monkeypatch.setitem(sys.modules, "flashinfer.jit", jit)
    copy = tmp_path / "flashinfer-headers-0123456789ab"
    monkeypatch.setattr("sgl_det.kernels.flashinfer_headers.patched_copy", lambda *_: copy)
    build = flashinfer._headers(lambda backend, *args: Spec(backend))
    assert build("fa3") == Spec("fa3") and build("fa2") == Spec("fa2_0123456789ab", [copy])


@pytest.mark.parametrize(
    "theirs, lengths, ours",
    [(True, [1, 4096], True), (True, [8192, 8192], False), (False, [1], False)],
)
def test_step_beyond_its_grid_is_run_eagerly(theirs, lengths, ours):
    can_run = flashinfer._graph(lambda self, batch: theirs)
    on_gpu = SimpleNamespace(cpu=lambda: np.array(lengths))
    batch = SimpleNamespace(seq_lens_cpu=np.array(lengths), seq_lens=None)
    assert can_run(None, batch) is ours
    assert can_run(None, SimpleNamespace(seq_lens_cpu=None, seq_lens=on_gpu)) is ours


def test_chunks_are_not_aligned():
    scheduler = SimpleNamespace()

    def original(self):
        self.truncation_align_size = 4096

    chunks._anywhere(original)(scheduler)
    assert scheduler.truncation_align_size is None


def runner(chunked: int, context: int = 32768):
    model = SimpleNamespace(
        context_len=context,
        head_dim=128,
        get_max_num_attention_heads=lambda: 32,
        get_num_kv_heads=lambda shards: 8 // shards,
    )
    return SimpleNamespace(
        model_config=model,
        server_args=SimpleNamespace(chunked_prefill_size=chunked, max_prefill_tokens=16384),
        max_total_num_tokens=100_000,
        req_to_token_pool=SimpleNamespace(size=256),
        device="meta",
    )


@pytest.mark.parametrize("chunked, rows", [(8192, 8192), (-1, 32768), (None, 32768), (64, 256)])
def test_workspace_is_what_the_largest_step_needs(monkeypatch, settings, chunked, rows):
    context, buffers = ModuleType("sglang.srt.runtime_context"), {}
    context.get_buffer = lambda name, make: buffers.setdefault(name, make())
    context.get_parallel = lambda: SimpleNamespace(attn_tp_size=1)
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    seen = []
    init = flashinfer._backend(lambda self, *args: seen.append((args, dict(buffers))))
    monkeypatch.setattr(flashinfer, "prove", lambda *_: seen.append("proven"))
    if rows == 32768:  # 2^32 elements: the kernel could not address them
        with pytest.raises(flashinfer_plan.WorkspaceTooSmall, match="lower --chunked-prefill"):
            init(None, runner(chunked), True)
        return
    init(None, runner(chunked), True)
    (args, made), proven = seen
    assert proven == "proven"
    assert args[1:] == (True,)
    assert made["flashinfer_workspace"].numel() == rows * 32 * 32 * (2 * 128 + 4)
    assert settings.order.pool == 100_000 and settings.order.context == 32768
    assert settings.order.chunk == flashinfer_order.SPLIT
