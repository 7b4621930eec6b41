"""FlashInfer's patches for one order: what is replaced, on stand-ins; and that they fit."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from sgl_det.check import FITS, judge_all
from sgl_det.kernels import attention, attention_decode, flashinfer_order
from sgl_det.kernels.flashinfer_order import ORDER, SPLIT
from sgl_det.patches import decode_programs, flashinfer, phases


def test_patches_fit_what_is_installed():
    assert [v for v in judge_all(flashinfer.patches()) if v.verdict != FITS] == []


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


def test_everything_is_planned_in_one_pass():
    seen = []
    for wrap in (flashinfer._plan, flashinfer._decode_plan):
        wrap(lambda self, *args, **given: seen.append((args, given)))(
            None, 1, fixed_split_size=2048
        )
    one_pass = {"fixed_split_size": None, "disable_split_kv": True}
    assert seen == [((1,), one_pass)] * 2


GIVEN = {"sm_scale": 0.125, "logits_soft_cap": 0.0, "k_scale": None, "v_scale": 1.0}


class Wrapper:
    """What our patches see of a wrapper: three requests with 2, 1 and 3 new tokens."""

    def __init__(self, longest: int):
        self._max_kv_len, self._max_q_len = longest, 3
        self._paged_kv_indptr_buf = torch.tensor([0, 5, 5 + longest, 15 + longest])
        self._paged_kv_indices_buf = torch.arange(15 + longest)
        self._qo_indptr_buf = torch.tensor([0, 2, 3, 6])


@pytest.fixture
def calls(monkeypatch):
    seen = SimpleNamespace(theirs=[], extend=[], decode=[])
    for module, name in ((attention, "attention"), (attention_decode, "decode_attention")):
        kept = seen.extend if name == "attention" else seen.decode
        monkeypatch.setattr(module, name, lambda *a, kept=kept, **k: kept.append((a, k)))
    work = attention_decode.Work.allocate(33, 4, 8 * SPLIT, 64, "cpu", SPLIT)
    monkeypatch.setattr(flashinfer._STATE, "work", work)
    return seen


def pools(dims: int):
    shape = (9, 1, 2, 64) if dims == 4 else (9, 2, 64)
    return torch.zeros(shape), torch.ones(shape)


@pytest.mark.parametrize("dims", [3, 4])
@pytest.mark.parametrize("longest, theirs", [(SPLIT, True), (SPLIT + 1, False)])
def test_long_requests_take_our_kernel(calls, longest, theirs, dims):
    wrapper, q = Wrapper(longest), torch.zeros(6, 4, 64)
    prefill = flashinfer._prefill(lambda self, *args, **given: calls.theirs.append((args, given)))
    prefill(wrapper, q, pools(dims), causal=True, window_left=-1, **GIVEN)
    assert (len(calls.theirs), len(calls.extend)) == (int(theirs), int(not theirs))
    if not theirs:
        ((_, k, v, table, begin, starts, lengths, most, options), _), *_ = calls.extend
        assert k.shape == v.shape == (9, 2, 64) and table.shape[1] == 1 and table.stride(0) == 1
        assert (begin.tolist(), lengths.tolist()) == ([0, 5, 5 + longest], [5, longest, 10])
        assert (starts.tolist(), most) == ([0, 2, 3, 6], 3)
        assert options.scale == 0.125 and options.order is ORDER


def test_decode_takes_our_kernel(calls):
    wrapper, q = Wrapper(7), torch.zeros(3, 4, 64)
    flashinfer._decode(lambda *_: pytest.fail("FlashInfer decodes"))(wrapper, q, pools(3), **GIVEN)
    ((_, k, _, slots, ends, lengths, options), more), *_ = calls.decode
    assert (ends.tolist(), lengths, slots.tolist()) == ([5, 12, 22], None, list(range(22)))
    shared = decode_programs.shared(flashinfer._STATE.work, 3, 2, ORDER)
    assert more == {"work": flashinfer._STATE.work, "shared": shared} and shared == 8
    assert options.order is ORDER


@pytest.mark.parametrize(
    "change, says",
    [
        ({"causal": False}, "causal"),
        ({"window_left": 127}, "window_left"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap"),
        ({"k_scale": 0.5}, "k_scale"),
        ({"sm_scale": None}, "no sm_scale"),
    ],
)
@pytest.mark.parametrize("longest", [1, SPLIT + 1])
def test_other_calls_are_refused(calls, change, says, longest):
    prefill = flashinfer._prefill(lambda *_, **__: pytest.fail("was called"))
    with pytest.raises(RuntimeError, match=f"called with {says}: no order is held"):
        prefill(
            Wrapper(longest), torch.zeros(6, 4, 64), pools(3), **{"causal": True, **GIVEN, **change}
        )


def test_start_proves_and_takes_little_memory(monkeypatch):
    context, buffers = ModuleType("sglang.srt.runtime_context"), {}
    context.get_buffer = lambda name, make: buffers.setdefault(name, make())
    context.get_parallel = lambda: SimpleNamespace(attn_tp_size=1)
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    proven = []
    monkeypatch.setattr(phases, "prove", lambda attend, runner, order: proven.append(order))
    monkeypatch.setattr(flashinfer._STATE, "work", None)
    model = SimpleNamespace(
        num_attention_heads=32, get_num_kv_heads=lambda tp: 8, head_dim=128, context_len=40960
    )
    runner = SimpleNamespace(model_config=model, device="cpu", dtype=torch.bfloat16)
    init = flashinfer._start(lambda self, runner: proven.append(dict(buffers)))
    init(None, runner)
    made, order = proven
    assert made["flashinfer_workspace"].numel() == 128 << 20
    assert (order.block, order.split) == (flashinfer_order.KV_TILE, SPLIT)
    assert flashinfer._STATE.work.parts.shape == (2 * 132 // 8, 32, 40960 // SPLIT, 128)
    model.head_dim = 96
    with pytest.raises(ValueError, match="no order for heads of 96"):
        init(None, runner)
