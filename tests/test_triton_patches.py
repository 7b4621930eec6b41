"""The patches of the Triton backend: what the kernels are called with, and what is refused."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from sgl_det.check import FITS, judge_all
from sgl_det.kernels import attention as extend_module
from sgl_det.kernels import attention_decode, attention_order, attention_proof, proof
from sgl_det.patches import decode_programs, triton

ORDER = attention_order.Order(attention_order.BLOCK_S, attention_order.SPLIT)

LAYER = SimpleNamespace(
    layer_id=3,
    tp_q_head_num=4,
    tp_k_head_num=2,
    qk_head_dim=8,
    v_head_dim=8,
    scaling=0.5,
    k_scale=None,
    v_scale=None,
    logit_cap=0.0,
    logit_capping_method="tanh",
    xai_temperature_len=-1,
    sliding_window_size=None,
)


def layer(**other):
    return SimpleNamespace(**vars(LAYER) | other)


@pytest.fixture
def calls(monkeypatch):
    """What our kernels were called with; importing SGLang takes half a minute."""
    seen = SimpleNamespace(extend=[], decode=[])

    def attention(q, *args, out, **more):
        seen.extend.append((q, *args, more))
        out.fill_(1)

    def decode(q, *args, **more):
        seen.decode.append((q, *args, more))
        return torch.ones_like(q)

    monkeypatch.setattr(extend_module, "attention", attention)
    monkeypatch.setattr(attention_decode, "decode_attention", decode)
    backend = SimpleNamespace(logit_capping_mod=lambda method, cap: cap)
    where = SimpleNamespace(KVWriteLoc=lambda *args, full_loc: (*args, full_loc))
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.attention.triton_backend", backend)
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache.memory_pool", where)
    return seen


@pytest.fixture
def backend():
    """As SGLang's, for two requests of 3 and 5 new tokens."""
    pool = SimpleNamespace(
        get_key_buffer=lambda i: f"keys {i}", get_value_buffer=lambda i: f"values {i}"
    )
    metadata = SimpleNamespace(
        custom_mask=None,
        qo_indptr=torch.tensor([0, 3, 8, 0, 0]),
        max_extend_len=5,
        kv_indptr=torch.tensor([0, 13, 18, 0]),
        kv_indices="slots",
        window_kv_indptr=torch.tensor([0, 9, 14, 0]),
        window_kv_indices="slots of windows",
        swa_out_cache_loc=None,
        out_cache_loc_full_physical=None,
    )
    written = []
    return SimpleNamespace(
        token_to_kv_pool=pool,
        forward_metadata=metadata,
        req_to_token="table",
        v_head_dim=8,
        sgl_det_work=attention_decode.Work.allocate(33, 4, 80 * attention_order.SPLIT, 8, "cpu"),
        sgl_det_order=ORDER,
        written=written,
        _set_kv_buffer=lambda *args: written.append(args[2:]),
    )


BATCH = SimpleNamespace(
    batch_size=2,
    req_pool_indices=torch.tensor([7, 5]),
    seq_lens=torch.tensor([13, 5]),
    out_cache_loc=torch.tensor([40, 41]),
)


def extend(backend, layer, *, causal=True, cap=0.0, score_mod=None):
    q = torch.zeros(8, 32)
    run = triton._extend(lambda *args: None)
    return run(backend, q, torch.zeros_like(q), layer, BATCH, causal, cap, None, score_mod)


def test_prompts_and_prefixes_are_read_from_the_table(calls, backend):
    o = extend(backend, LAYER)
    (found,) = calls.extend
    q, keys, values, table, rows, starts, lengths, most, options, more = found
    assert q.shape == (8, 4, 8) and (keys, values, table) == ("keys 3", "values 3", "table")
    assert (rows.tolist(), starts.tolist(), lengths.tolist()) == ([7, 5], [0, 3, 8], [13, 5])
    assert (most, options.scale, options.window, more) == (5, 0.5, -1, {})
    assert o.shape == (8, 32) and o.min() == 1


def test_decode_writes_its_keys_and_reads_the_table(calls, backend):
    q, k, v = torch.zeros(2, 32), torch.zeros(2, 16), torch.ones(2, 16)
    o = triton._decode(lambda *args: None)(backend, q, k, v, LAYER, BATCH)
    ((where, written_k, written_v, *scales),) = backend.written
    assert where[0] is BATCH.out_cache_loc and (written_k is k, written_v is v) == (True, True)
    assert scales == [None, None]
    q, keys, values, table, rows, lengths, options, more = calls.decode[0]
    assert q.shape == (2, 4, 8) and (keys, values, table) == ("keys 3", "values 3", "slots")
    assert rows.tolist() == [13, 18] and lengths is BATCH.seq_lens
    assert more == {"work": backend.sgl_det_work, "shared": 33} and options.scale == 0.5
    assert o.shape == (2, 32) and o.min() == 1
    triton._decode(lambda *args: None)(backend, q, k, v, LAYER, BATCH, save_kv_cache=False)
    assert len(backend.written) == 1
    triton._decode(lambda *args: None)(backend, q, k, v, layer(sliding_window_size=8), BATCH)
    _, _, _, table, rows, _, options, _ = calls.decode[-1]
    # SGLang's list for windows lacks the oldest key that prefill sees.
    assert (table, rows.tolist(), options.window) == ("slots", [13, 18], 8)


@pytest.mark.parametrize(
    "batch, groups, shared", [(1, 8, 16), (1, 1, 80), (16, 8, 1), (33, 2, 2), (34, 1, 1)]
)
def test_programs_fill_the_gpu(backend, batch, groups, shared):
    """80 splits at most; memory for 33 requests."""
    assert decode_programs.shared(backend.sgl_det_work, batch, groups, ORDER) == shared
    small = attention_order.Order(64, attention_order.SPLIT)
    twice = decode_programs.shared(backend.sgl_det_work, batch, groups, small)
    assert shared <= twice <= 2 * shared + 1


def test_options_of_a_layer(calls, backend):
    extend(backend, layer(sliding_window_size=128), cap=30.0)
    options = calls.extend[0][8]
    assert (options.window, options.cap, options.moved) == (128, 30.0, None)
    backend.token_to_kv_pool.full_to_swa_index_mapping = "elsewhere"
    extend(backend, layer(sliding_window_size=128))
    extend(backend, LAYER)
    assert [call[8].moved for call in calls.extend[1:]] == ["elsewhere", None]


@pytest.mark.parametrize(
    "other, said",
    [
        ({"k_scale": 1.0}, "scaled keys"),
        ({"xai_temperature_len": 4}, "a temperature"),
        ({"v_head_dim": 16}, "values of another size than keys"),
    ],
)
def test_what_is_not_held_raises(calls, backend, other, said):
    with pytest.raises(RuntimeError, match=f"layer 3 has attention with {said}, expected none"):
        triton._options(layer(**other), 0.0, None, None, None)
    with pytest.raises(RuntimeError, match="a score function"):
        extend(backend, LAYER, score_mod=max)
    assert not calls.extend


@pytest.mark.parametrize("how", ["not causal", "masked"])
def test_other_masks_raise(calls, backend, how):
    if how == "masked":
        backend.forward_metadata.custom_mask = torch.ones(3)
    with pytest.raises(RuntimeError, match="layer 3 has attention that is not causal"):
        extend(backend, LAYER, causal=how == "masked")


@pytest.fixture
def started(monkeypatch):
    """Start a backend whose proof finds what is given."""
    monkeypatch.setattr(proof, "PROVEN", {})

    def start(found="", window=None, asked=None):
        def proof_of(heads, options):
            (asked if asked is not None else []).append((options.cap, options.window))
            return found

        monkeypatch.setattr(attention_proof, "first_mismatch", proof_of)
        backend = SimpleNamespace(
            num_head=32,
            num_kv_head=8,
            v_head_dim=128,
            max_context_len=40960,
            max_kv_splits=160,
            device_core_count=132,
            device="cpu",
            sliding_window_size=window,
        )
        config = SimpleNamespace(hf_text_config=SimpleNamespace(attn_logit_softcapping=50.0))
        runner = SimpleNamespace(dtype=torch.bfloat16, model_config=config)
        triton._start(lambda self, runner: None)(backend, runner)
        return backend

    return start


def test_start_proves_and_takes_memory_within_bounds(started):
    backend = started()
    assert proof.PROVEN["rows"] == {"attention 32/8 heads of 128": "sgl_det"}
    splits = -(-40960 // attention_order.SPLIT)
    assert backend.max_kv_splits == 1 and backend.sgl_det_work.parts.shape == (16, 32, splits, 128)


def test_what_the_layers_ask_for_is_proven(started):
    asked = []
    started(window=512, asked=asked)
    assert asked == [(50.0, -1), (50.0, 512)]


def test_memory_bounds_the_requests_that_share(started, monkeypatch):
    monkeypatch.setattr(decode_programs, "WORK_BYTES", 1)
    assert len(started().sgl_det_work.parts) == 1


def test_unproven_attention_ends_the_start(started):
    with pytest.raises(RuntimeError, match="32 heads of 128 does not have one order.*7 elements"):
        started("7 elements differ")
    assert "rows" not in proof.PROVEN


def test_table_fits_what_is_installed():
    ours = triton.patches()
    assert [v for v in judge_all(ours) if v.verdict != FITS] == []
    names = [p.name for p in ours]
    assert names == [*(f"triton.{row[0]}" for row in triton._TABLE), "chunks.anywhere"]
