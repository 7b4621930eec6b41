"""How the backends' patches prove their phases at start-up: what is asked, recorded and refused."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from sgl_det.kernels import phases_proof, proof
from sgl_det.kernels.fa3_chunks import CHUNKS, Chunked
from sgl_det.kernels.fa3_extend import Extend
from sgl_det.kernels.order import ReductionOrder
from sgl_det.kernels.phases_proof import Step
from sgl_det.patches import fa3, fa3_start, flashinfer, phases

ORDER = ReductionOrder(axis="S", block=128, split=4096)


@pytest.fixture(autouse=True)
def nothing_proven(monkeypatch):
    monkeypatch.setattr(proof, "PROVEN", {})


@pytest.fixture
def upstream(monkeypatch):
    """Modules of SGLang with what is put into them."""

    def put(name: str, **content) -> None:
        parts = name.split(".")
        for i in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(parts[i - 1]))
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)

    return put


@pytest.fixture
def proven(monkeypatch, upstream):
    """Runs the proof of a model; what the proof finds is given, what it was asked is returned."""
    upstream("sglang.srt.runtime_context", get_parallel=lambda: SimpleNamespace(attn_tp_size=2))

    def run(found: str = "", context: int = 40960) -> list:
        asked = []
        model = SimpleNamespace(
            num_attention_heads=32, get_num_kv_heads=lambda tp: 8 // tp, head_dim=128
        )
        model.context_len = context
        runner = SimpleNamespace(model_config=model, dtype=torch.bfloat16, device="cuda")

        def mismatch(*given, short):
            assert short == ORDER.split
            asked.append(given)
            return found

        monkeypatch.setattr(phases_proof, "first_mismatch", mismatch)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        phases.prove("attend", runner, ORDER)
        return asked

    return run


def test_heads_of_the_shard_are_proven_and_recorded(proven):
    ((attend, heads, of, device),) = proven()
    assert (attend, device) == ("attend", "cuda")
    assert (heads.queries, heads.keys, heads.d) == (16, 4, 128)
    assert {127, 128, 129, 4095, 4096, 4097, 8193} <= set(of)
    assert proof.PROVEN["rows"] == {"attention 16/4 heads of 128": "sgl_det"}


def test_contexts_that_cannot_occur_are_left_out(proven):
    ((_, _, of, _),) = proven(context=4096)
    assert max(of) == 4096


def test_unproven_attention_ends_the_start(proven):
    with pytest.raises(RuntimeError, match="16/4 heads of 128 does not have one order.*7 elements"):
        proven("7 elements differ")
    assert "rows" not in proof.PROVEN


def step(lengths: list[int], new: list[int], decode: bool) -> Step:
    q, pool = torch.zeros(sum(new), 4, 128), torch.zeros(8, 1, 2, 128)
    table = torch.zeros(len(lengths), max(lengths), dtype=torch.int32)
    return Step(q, pool, pool, table, lengths, new, decode)


@pytest.mark.parametrize(
    "lengths, new, decode, plan",
    [
        ([9, 4096], [1, 1], True, str),
        ([9, 4097], [1, 1], True, Chunked),
        ([9, 4096], [9, 96], False, str),
        ([9, 4097], [9, 1], False, Extend),
    ],
)
def test_fa3_is_called_as_the_layers_call_it(upstream, lengths, new, decode, plan):
    calls = []
    upstream(
        "sglang.kernels.ops.attention.flash_attention",
        flash_attn_with_kvcache=lambda **given: calls.append(given),
    )
    fa3_start.attend(step(lengths, new, decode))
    (given,) = calls
    assert CHUNKS[128] == 4096 and isinstance(getattr(given["cache_seqlens"], fa3.PLAN), plan)
    assert given["cache_seqlens"].tolist() == lengths and given["max_seqlen_q"] == max(new)
    assert given["cu_seqlens_q"].tolist() == [0, new[0], sum(new)] and given["causal"]


class Wrapper:
    def begin_forward(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs

    def forward(self, q, pools, **kwargs):
        return kwargs


def test_flashinfer_is_asked_through_the_wrappers_that_serve():
    wrapper = Wrapper()
    backend = SimpleNamespace(decode_wrappers=[wrapper], prefill_wrappers_paged=[wrapper])
    assert flashinfer.attend(backend, step([5, 3], [1, 1], True)) == {"sm_scale": 128**-0.5}
    keys, indices, pages, *sizes = wrapper.args
    assert keys.tolist() == [0, 5, 8] and len(indices) == 8 and pages.tolist() == [1, 1]
    assert sizes == [4, 2, 128, 1]
    found = flashinfer.attend(backend, step([5, 3], [2, 3], False))
    assert found == {"sm_scale": 128**-0.5, "causal": True}
    rows, keys, *_ = wrapper.args
    assert rows.tolist() == [0, 2, 5] and keys.tolist() == [0, 5, 8]
