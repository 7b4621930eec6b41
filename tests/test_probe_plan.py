"""What the probe plans to send, from the limits that a server tells."""

from __future__ import annotations

import pytest

from sgl_det.axis import Axis
from sgl_det.probe import cases_edges, cases_prefill
from sgl_det.probe.cases import Ask, Context, Skip, _list_body
from sgl_det.probe.client import USUAL_SPLITS, Facts, _splits
from sgl_det.probe.prompts import Prompts, texts
from sgl_det.probe.runner import DRIVEN, OUT_OF_REACH, _chosen, _in_turns, _plan
from sgl_det.probe.table import Tally


def facts(**changes) -> Facts:
    values = {
        "key": None,
        "claims": None,
        "not_claimed": {},
        "vocab_size": 320,
        "max_input": 2000,
        "max_total": 20000,
        "max_running": 128,
        "chunk": 256,
        "splits": (),
        "radix": True,
        "grammar": True,
        "page_size": 1,
        "device": "cpu",
        "model": "m",
        "recorded": {"backend": "torch_native", "sglang": "0.5.17"},
    }
    return Facts(**(values | changes))


GPU = {"chunk": 8192, "max_input": 40000, "max_total": 400000, "device": "cuda"}


def context(quick=True, **changes) -> Context:
    f = facts(**changes)
    return Context(None, f, Prompts(f, 0, [(t, None) for t in texts(0)]), quick, 0)


def test_prompts_differ_stay_in_range_and_follow_the_seed():
    pool = context().prompts.pool(100)
    ids = [p.ids for p in pool if p.ids]
    assert len({p.digest() for p in pool}) == 100
    assert len({i[0] for i in ids}) == len(ids)
    assert all(0 <= t < 320 for i in ids for t in i)
    assert any(p.text for p in pool)
    assert pool == context().prompts.pool(100)
    other = Prompts(facts(), 1, [(t, None) for t in texts(1)]).pool(100)
    assert not {p.digest() for p in pool} & {p.digest() for p in other if p.tokens > 2}


def test_prompts_do_not_depend_on_the_axes_chosen():
    def planned(axes):
        ctx = context()
        return {p.name: p.digest() for c in _plan(ctx, axes, tallies) for p in c.needs}

    tallies = {a: Tally(a) for a in Axis}
    every = planned(list(DRIVEN))
    for axis in DRIVEN:
        assert planned([axis]).items() <= every.items()


def test_pools_share_their_beginning():
    prompts = context().prompts
    small, large = prompts.pool(3), prompts.pool(33)
    assert large[:3] == small and large[0] == prompts.subject


def test_first_tokens_avoid_the_texts():
    f = facts(vocab_size=8)
    prompts = Prompts(f, 0, [("x", [3, 1]), ("y", [5])])
    assert {prompts.random(f"ids-{i}", 2).ids[0] for i in range(6)} == {0, 1, 2, 4, 6, 7}


def test_small_vocabularies_are_used_again_rather_than_left():
    prompts = Prompts(facts(vocab_size=2), 0, [])
    assert {prompts.random(f"ids-{i}", 3).ids[0] for i in range(9)} == {0, 1}


def test_every_axis_is_driven_or_explained():
    assert set(DRIVEN) | set(OUT_OF_REACH) == set(Axis)
    assert not set(DRIVEN) & set(OUT_OF_REACH)


@pytest.mark.parametrize("quick", [True, False], ids=["quick", "full"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        GPU | {"splits": USUAL_SPLITS},
        GPU | {"splits": (4096,), "chunk": 2048, "max_total": 60000},
        {"chunk": 8192, "max_input": 500},
        {"max_running": 4, "max_total": 3000},
        {"page_size": 64},
        {"vocab_size": 256, "radix": False, "chunk": None},
    ],
    ids=["demo", "gpu", "gpu-side-by-side", "short-context", "small-server", "pages", "no-radix"],
)
def test_plans_respect_the_limits(quick, changes):
    ctx = context(quick, **changes)
    tallies = {a: Tally(a) for a in Axis}
    cases = _plan(ctx, list(DRIVEN), tallies)
    for case in cases:
        assert len(case.needs) <= ctx.facts.max_running
        for p in case.needs:
            assert p.tokens + p.new_tokens <= ctx.facts.max_input, case.name
    for axis in DRIVEN:
        assert any(c.axis == axis for c in cases) or tallies[axis].excused, axis


def test_chunked_prefill_straddles_the_chunk():
    lengths = {p.tokens for c in cases_prefill.chunked_prefill(context(False)) for p in c.needs}
    assert {255, 256, 257, 513} <= lengths


def lengths(ctx, axis):
    return {p.tokens for c in cases_edges.cases(ctx, axis) for p in c.needs}


def test_edges_are_tiles_splits_and_the_chunk_where_they_fit():
    big = GPU | {"chunk": 2048, "splits": (512,)}
    assert list(cases_edges.edges(context(False, **big))) == [64, 128, 512, 1024, 2048]
    assert list(cases_edges.edges(context(True, **big))) == [128, 512]
    assert list(cases_edges.edges(context(True, **GPU))) == [128, 8192]
    assert list(cases_edges.edges(context(False, **big | {"max_input": 600}))) == [64, 128, 512]
    assert list(cases_edges.edges(context(False, splits=USUAL_SPLITS))) == [64, 128, 256, 512, 1024]
    assert list(cases_edges.edges(context(True, splits=USUAL_SPLITS))) == [128]
    assert not cases_edges.edges(context(True, max_input=100))


def test_prompts_of_an_edge_do_not_depend_on_the_chunk_size():
    one, other = (context(False, **GPU | {"splits": (512,), "chunk": n}) for n in (2048, 8192))
    names = [{p.name: p.digest() for p in cases_edges._prompts(c).values()} for c in (one, other)]
    assert len(names[0].items() & names[1].items()) == 4


def test_edges_are_crossed_by_every_way_to_compute_a_position():
    ctx = context(False, **GPU | {"splits": (512,), "chunk": 2048})
    around = {e + d for e in cases_edges.edges(ctx) for d in (-1, 0, 1)}
    assert lengths(ctx, Axis.PREFILL_VS_DECODE) == {e - 3 for e in cases_edges.edges(ctx)}
    names = [c.name for c in cases_edges.cases(ctx, Axis.PREFILL_VS_DECODE)]
    assert {f"{n} tokens prefilled" for n in around} <= set(names)
    assert {f"{n} tokens in the cache" for n in around} <= set(names)
    names = [c.name for c in cases_edges.cases(ctx, Axis.PREFIX_CACHE)]
    assert {f"first {n} warm" for n in around} == {x.split(" (")[0] for x in names if "warm" in x}
    assert len([n for n in names if n.startswith("turn 2")]) == 6
    cuts = cases_edges.cases(ctx, Axis.CHUNKED_PREFILL)
    assert {int(c.name.rpartition(" ")[2]) for c in cuts} == around
    assert max(lengths(ctx, Axis.LONG_BESIDE_SHORT)) == 8192


def test_quick_probes_take_few_edges():
    for splits in ((512,), (4096,)):
        ctx = context(True, **GPU | {"splits": splits, "chunk": 2048})
        assert sum(len(cases_edges.cases(ctx, axis)) for axis in DRIVEN) == 10
    assert sum(len(cases_edges.cases(context(True), axis)) for axis in DRIVEN) == 6


@pytest.mark.parametrize(
    "det, splits",
    [
        ({}, USUAL_SPLITS),
        ({"numerics": {}}, USUAL_SPLITS),
        ({"numerics": {"split_tokens": {"prefill": None, "decode": None}}}, ()),
        ({"numerics": {"split_tokens": {"prefill": 512, "decode": 256}}}, (256, 512)),
        ({"numerics": {"split_tokens": 1024}}, (1024,)),
    ],
    ids=["stock", "not-told", "none", "by-phase", "one"],
)
def test_split_sizes_told_by_the_server(det, splits):
    assert _splits(det) == splits


def test_axes_take_turns_when_time_is_short():
    ctx = context()
    cases = _plan(ctx, list(DRIVEN), {a: Tally(a) for a in Axis})
    turns = _in_turns(cases)
    assert [c.axis for c in turns[: len(DRIVEN)]] == list(DRIVEN)
    assert sorted(map(id, turns)) == sorted(map(id, cases))


def test_axes_without_anything_to_vary_say_why():
    with pytest.raises(Skip, match="cache is off"):
        cases_prefill.prefix_cache(context(radix=False))
    with pytest.raises(Skip, match="chunked prefill is off"):
        cases_prefill.chunked_prefill(context(chunk=None))


def test_list_bodies_have_one_entry_for_each_prompt():
    pool = context().prompts.pool(3, with_texts=False)
    body = _list_body([Ask(pool[0]), Ask(pool[1], {"temperature": 1.0}), Ask(pool[2])])
    assert {len(v) for v in body.values()} == {3}
    assert [p["temperature"] for p in body["sampling_params"]] == [0.0, 1.0, 0.0]


def test_chosen_axes():
    assert _chosen(["prefix_cache", "batch_size"]) == [Axis.BATCH_SIZE, Axis.PREFIX_CACHE]
    assert _chosen(None) == list(DRIVEN)
    with pytest.raises(ValueError, match="'restart'; it drives run_to_run"):
        _chosen(["restart"])
