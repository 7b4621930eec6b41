"""What the probe plans to send, from the limits that a server tells."""

from __future__ import annotations

import pytest

from sgl_det.axis import Axis
from sgl_det.probe import cases_prefill
from sgl_det.probe.cases import Ask, Context, Skip, _list_body
from sgl_det.probe.client import Facts
from sgl_det.probe.prompts import Prompts, texts
from sgl_det.probe.runner import DRIVEN, OUT_OF_REACH, _chosen, _plan
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
        "radix": True,
        "page_size": 1,
        "device": "cpu",
        "model": "m",
        "recorded": {"backend": "torch_native", "sglang": "0.5.17"},
    }
    return Facts(**(values | changes))


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
        {"chunk": 8192, "max_input": 40000, "max_total": 400000, "device": "cuda"},
        {"chunk": 8192, "max_input": 500},
        {"max_running": 4, "max_total": 3000},
        {"page_size": 64},
        {"vocab_size": 256, "radix": False, "chunk": None},
    ],
    ids=["demo", "gpu", "short-context", "small-server", "pages", "no-radix"],
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
