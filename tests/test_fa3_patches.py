"""The patches of FA3 around a twin of it: what is planned, what is called, what is refused."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from fa3_support import CHUNK, LENGTHS, G, H, Pool

from sgl_det.check import FITS, judge_all
from sgl_det.kernels import fa3_chunks, fa3_decode, fa3_extend
from sgl_det.kernels.fa3_chunks import Sequences, chunks_of
from sgl_det.kernels.fa3_decode import Few
from sgl_det.kernels.merge_chunks import reference
from sgl_det.patches import fa3, fa3_graphs, fa3_start
from sgl_det.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("nan_filled_empty", "small")
WIDTH, EVERY = 48, tuple(range(len(LENGTHS)))


@pytest.fixture
def small(monkeypatch):
    """Heads of 64 stand for any: chunks of 8 tokens, and the merge in PyTorch."""
    monkeypatch.setitem(fa3_chunks.CHUNKS, 64, CHUNK)
    for module, name in ((fa3_chunks, "decode_attention"), (fa3_extend, "extend_attention")):
        monkeypatch.setattr(module, name, partial(getattr(module, name), merge=reference))


class Mode(SimpleNamespace):
    def is_decode_or_idle(self):
        return self.name == "decode"

    def is_target_verify(self):
        return self.name == "verify"

    def is_dllm_extend(self):
        return False


class Server:
    """SGLang's backend and FA3 in so far as the patches see them."""

    def __init__(self):
        self.pool, self.asked = Pool(), []
        self.backend = SimpleNamespace(
            **dict.fromkeys(("use_mla", "has_swa", "has_local_attention"), False),
            **{"head_dim": 64, "page_size": 1, "fa_impl_ver": 3, "is_encoder_decoder": False},
            **{"max_context_len": WIDTH, "num_attention_heads": H, "num_kv_heads": G},
            token_to_kv_pool=SimpleNamespace(size=80),
            kv_cache_dtype=torch.bfloat16,
        )
        self.flash_attn_with_kvcache = fa3._call(self.kernel)

    def kernel(self, q, k_cache, v_cache, *, return_softmax_lse=False, **given):
        self.asked.append(given)
        assert given["num_splits"] == 1
        names = ("page_table", "cache_seqlens", "cu_seqlens_q", "max_seqlen_q", "causal")
        o, lse = self.pool.fa3(q, Sequences(*map(given.get, names)), given.get("out"))
        return (o, lse) if return_softmax_lse else o

    def batch(self, prefix=None, requests=EVERY, known=True):
        """What init_forward_metadata is given: a prefill after ``prefix``, or a decode step."""
        lengths = torch.tensor([LENGTHS[b] for b in requests])
        batch = SimpleNamespace(seq_lens=lengths, spec_info=None, requests=list(requests))
        batch.forward_mode = Mode(name="decode" if prefix is None else "extend")
        batch.seq_lens_cpu = lengths if known else None
        batch.new = [1] * len(lengths)
        if prefix is not None:
            batch.new = [LENGTHS[b] - p for b, p in zip(requests, prefix, strict=True)]
            batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu = list(prefix), batch.new
        return batch

    def upstream_plan(self, backend, batch):
        starts = torch.nn.functional.pad(torch.tensor(batch.new).cumsum(0), (1, 0))
        backend.forward_metadata = SimpleNamespace(
            cache_seqlens_int32=batch.seq_lens.int(),
            page_table=self.pool.table[batch.requests],
            cu_seqlens_q=starts.int(),
        )

    def attention(self, batch, plan=fa3._eager, **given):
        """One layer -> o of every new token."""
        plan(self.upstream_plan)(self.backend, batch)
        m, q = self.backend.forward_metadata, []
        for b, new in zip(batch.requests, batch.new, strict=True):
            q.append(self.pool.q[b][-new:])
        call = {"page_table": m.page_table, "cache_seqlens": m.cache_seqlens_int32}
        call |= {"cu_seqlens_q": m.cu_seqlens_q, "cu_seqlens_k_new": m.cu_seqlens_q}
        call |= {"max_seqlen_q": max(batch.new), "causal": True, "window_size": (-1, -1)}
        call |= {"return_softmax_lse": False, "num_splits": 0, "ver": 3, **given}
        return self.flash_attn_with_kvcache(
            q=torch.cat(q), k_cache=self.pool.k, v_cache=self.pool.v, **call
        )


@pytest.fixture
def server():
    return Server()


SINKS = pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 2, H)], ids=["", "sinks"])


@SINKS
def test_prefill_decode_and_graph_agree(server, sinks):
    whole = server.attention(server.batch([0] * len(LENGTHS)), sinks=sinks).split(list(LENGTHS))
    hit = server.attention(server.batch([n - 1 for n in LENGTHS]), sinks=sinks)
    eager = server.attention(server.batch(), sinks=sinks)
    blind = server.attention(server.batch(known=False), sinks=sinks)
    server.backend.sgl_det_chunked = True
    graph = server.attention(server.batch(), plan=fa3._in_graph, sinks=sinks)
    for b in range(len(LENGTHS)):
        for name, o in (("hit", hit), ("eager", eager), ("blind", blind), ("graph", graph)):
            assert_bitwise_equal(o[b], whole[b][-1], f"{name}, request {b}")
        alone = server.attention(server.batch(requests=[b]), sinks=sinks)
        assert_bitwise_equal(alone[0], whole[b][-1], f"alone, request {b}")


@pytest.mark.parametrize("plan", [fa3._eager, fa3._in_graph])
def test_few_requests_take_the_kernel_of_the_whole_gpu(server, monkeypatch, plan):
    """Where the plan says so; capped scores, which it does not hold, take FA3 in the same order."""
    usual = server.attention(server.batch())
    taken = []

    def plan_few(lengths, longest, heads):
        taken.append(heads)
        return Few(chunks_of(longest, CHUNK))

    monkeypatch.setattr(fa3_decode, "plan_few", plan_few)
    monkeypatch.setattr(fa3_decode, "decode_attention", lambda q, *args, **ends: (args, ends))
    server.backend.sgl_det_chunked = True
    server.backend.token_to_kv_pool.size = WIDTH - CHUNK
    (k, v, table, lengths, chunks, scale), ends = server.attention(
        server.batch(), plan=plan, softmax_scale=0.5
    )
    # A graph holds the longest context, or all keys of a smaller pool.
    assert chunks == chunks_of(WIDTH - CHUNK if plan is fa3._in_graph else max(LENGTHS), CHUNK)
    assert scale == 0.5 and set(ends) == {"sinks", "out"}
    assert lengths.tolist() == list(LENGTHS) and len(table) == len(LENGTHS)
    assert k.shape == v.shape and k.dim() == 3
    assert (taken[0].queries, taken[0].keys, taken[0].d) == (H, G, 64)
    server.asked.clear()
    o = server.attention(server.batch(), plan=plan, softcap=30.0, softmax_scale=0.5)
    assert_bitwise_equal(o, usual, "in FA3")
    assert server.asked[0]["softcap"] == 30.0


def test_short_contexts_take_one_call_of_sglang(server):
    short = [b for b, n in enumerate(LENGTHS) if n <= CHUNK]
    out = torch.zeros(len(short), H, server.pool.q[0].shape[-1], dtype=torch.bfloat16)
    metadata = torch.zeros(9, dtype=torch.int32)
    batch = server.batch(requests=short)
    for plan in (fa3._eager, fa3._in_graph):
        server.asked.clear()
        o = server.attention(batch, plan=plan, out=out, scheduler_metadata=metadata)
        (asked,) = server.asked
        assert o is out and asked["scheduler_metadata"] is metadata
        assert asked["max_seqlen_q"] == 64 // (H // G) + 1
    server.attention(server.batch([0] * len(short), short))
    assert len(server.asked) == 2


def test_prefill_writes_where_it_is_told(server):
    out = torch.zeros(sum(LENGTHS), H, server.pool.q[0].shape[-1], dtype=torch.bfloat16)
    assert server.attention(server.batch([0] * len(LENGTHS)), out=out) is out


def test_scheduler_metadata_is_told_what_the_call_is(server):
    given = []

    def original(self, batch, longest, lengths, starts):
        return self._get_scheduler_metadata(max_seqlen_q=1, causal=True, batch_size=batch)

    def make(**named):
        given.append(named)
        return "made"

    server.backend._get_scheduler_metadata = make
    compute = fa3._metadata(original)
    assert compute(server.backend, 3, 9, None, None) == "made"
    assert given == [{"max_seqlen_q": 33, "causal": True, "batch_size": 3}]
    assert server.backend._get_scheduler_metadata is make
    server.backend.head_dim = 128
    compute(server.backend, 3, 9, None, None)
    assert given[-1]["max_seqlen_q"] == 1
    server.backend.sgl_det_chunked = True
    assert compute(server.backend, 3, 9, None, None) is None


def test_each_graph_is_captured_with_chunks_first(server):
    seen = []

    def original(self, size, forward, stream, variant):
        seen.append((size, variant, self.attn_backend.sgl_det_chunked))

    runner = SimpleNamespace(attn_backend=server.backend)
    fa3_graphs._capture(original)(runner, 4, None)
    assert seen == [(4, fa3_graphs.LONG, True), (4, None, False)]
    with pytest.raises(ValueError, match="variant lora"):
        fa3_graphs._capture(original)(runner, 4, None, None, "lora")
    server.backend.max_context_len = CHUNK
    seen.clear()
    fa3_graphs._capture(original)(runner, 4, None, None, "lora")
    assert seen == [(4, "lora", False)]


def test_the_host_picks_the_graph(server):
    runner = SimpleNamespace(attn_backend=server.backend)
    variant, fits = fa3_graphs._variant(lambda *_: None), fa3_graphs._fits(lambda *_: True)
    for lengths, name, fit in (
        ([1, CHUNK], None, True),
        ([1, CHUNK + 1], fa3_graphs.LONG, True),
        ([48, 41], fa3_graphs.LONG, True),
        ([48, 48, 9], fa3_graphs.LONG, False),  # 11 chunks beyond the first, where 80 // 8 fit
        ([], None, True),
    ):
        batch = SimpleNamespace(seq_lens_cpu=torch.tensor(lengths, dtype=torch.int64))
        assert (variant(runner, batch), fits(runner, batch)) == (name, fit), lengths
    unknown = SimpleNamespace(seq_lens_cpu=None)
    assert variant(runner, unknown) == fa3_graphs.LONG and not fits(runner, unknown)
    server.backend.max_context_len = CHUNK
    assert variant(runner, unknown) is None and fits(runner, unknown)


@pytest.mark.parametrize(
    "given, reason",
    [
        ({"window_size": (127, 0)}, "a window of"),
        ({"causal": False}, "not causal"),
        ({"return_softmax_lse": True}, "return_softmax_lse given"),
        ({"qv": torch.zeros(3, 2), "k_descale": torch.ones(2)}, "k_descale, qv given"),
        ({"ver": 4}, "version 4"),
        ({"cache_seqlens": torch.ones(8, dtype=torch.int32)}, "not planned"),
    ],
)
def test_other_calls_are_refused(server, given, reason):
    with pytest.raises(RuntimeError, match=reason):
        server.attention(server.batch(), **given)


def test_other_dtypes_and_pages_are_refused(server):
    queries, server.pool.q = server.pool.q, [q.float() for q in server.pool.q]
    with pytest.raises(RuntimeError, match="queries in torch.float32"):
        server.attention(server.batch())
    server.pool.q = queries
    server.pool.k = server.pool.k.view(-1, 2, G, server.pool.k.shape[-1])
    with pytest.raises(RuntimeError, match="pages of 2"):
        server.attention(server.batch())


@pytest.mark.parametrize(
    "change",
    [{"head_dim": 96}, {"page_size": 16}, {"use_mla": True}, {"has_swa": True}, {"fa_impl_ver": 4}],
    ids=str,
)
def test_other_models_are_refused(server, change):
    vars(server.backend).update(change)
    for plan in (fa3._eager, fa3._in_graph):
        with pytest.raises(ValueError, match="FA3 has no order for"):
            server.attention(server.batch(), plan=plan)


def test_table_fits_what_is_installed():
    for module in (fa3, fa3_graphs, fa3_start):
        ours = module.patches()
        assert [v for v in judge_all(ours) if v.verdict != FITS] == []
        assert [p.name for p in ours] == [f"fa3.{row[0]}" for row in module._TABLE]
