"""The probe's comparison, verdicts, tables and plans, without a server."""

from __future__ import annotations

import argparse
import json
import math

import pytest
import torch

from sgl_det.axis import Axis
from sgl_det.probe import cases_prefill, verb
from sgl_det.probe.cases import Ask, Context, Skip, _list_body
from sgl_det.probe.client import Facts, ProbeError, joined_stream, native_answer
from sgl_det.probe.compare import Answer, compare, hex_bits
from sgl_det.probe.prompts import Prompts, texts
from sgl_det.probe.restart import compare_reports
from sgl_det.probe.runner import DRIVEN, OUT_OF_REACH, _chosen, _plan
from sgl_det.probe.table import AxisResult, Report, Tally, verdict
from sgl_det.testing import assert_bitwise_equal, first_divergence


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


def answer(tokens=(1, 2, 3), logprobs=(-1.0, -2.0, -3.0), top=None) -> Answer:
    return Answer(tuple(tokens), tuple(hex_bits(p) for p in logprobs), top)


def report(rows, **changes) -> Report:
    counts = {"conditions": 0, "answers": 0, "prompts": 0, "unique_tokens": 0, "unique_logprobs": 0}
    values = {
        "url": "http://x",
        "key": "0123456789ab",
        "seed": 0,
        "quick": True,
        "seconds": 1.0,
        "server": {},
        "rows": tuple(rows),
        "answers": {},
        "subject": counts,
        "total": counts,
    }
    return Report(**(values | changes))


def row(axis=Axis.BATCH_SIZE, claimed=True, requests=1, mismatches=0, **changes) -> AxisResult:
    values = {"driven": True, "requests": requests, "mismatches": mismatches}
    verdict_ = verdict(requests, mismatches, claimed)
    return AxisResult(axis=axis, verdict=verdict_, claimed=claimed, **(values | changes))


# Answers


def test_equal_answers_have_no_divergence():
    assert compare(answer(), answer(), axis="a", case="c", request="r") is None


@pytest.mark.parametrize(
    "changed, part, index",
    [
        (answer(tokens=(1, 9, 3)), "token", 1),
        (answer(logprobs=(-1.0, math.nextafter(-2.0, 0), -3.0)), "logprob", 1),
        (answer(logprobs=(-1.0, None, -3.0)), "logprob", 1),
        (answer(tokens=(1, 2), logprobs=(-1.0, -2.0)), "length", 2),
    ],
    ids=["token", "one-ulp", "not-a-number", "length"],
)
def test_first_divergence_names_part_and_place(changed, part, index):
    found = compare(answer(), changed, axis="batch_size", case="n=2", request="ids-1")
    assert (found.part, found.index) == (part, index)
    assert "ids-1" in str(found) and "0x" in str(found)


def test_negative_zero_is_another_logprob():
    found = compare(
        answer(logprobs=(0.0,) * 3), answer(logprobs=(-0.0,) * 3), axis="", case="", request=""
    )
    assert found.index == 0 and found.expected_logprob != found.actual_logprob


def test_a_token_divergence_comes_before_a_later_top_logprob_and_not_before_an_earlier_one():
    top = (((1, "a"),), ((2, "b"),), ((3, "c"),))
    early = (((1, "x"),), *top[1:])
    a, b = answer(top=top), answer(tokens=(1, 9, 3), top=early)
    assert compare(a, b, axis="", case="", request="").part == "top_logprobs"
    assert compare(a, answer(tokens=(9, 2, 3), top=early), axis="", case="", request="").index == 0


def test_lists_of_other_lengths_share_values_and_not_the_order_of_ties():
    two = answer(top=(((7, "p"), (8, "p")),) * 3)
    tied = answer(top=(((8, "p"), (7, "p"), (5, "q")),) * 3)
    swapped = answer(top=(((8, "p"), (7, "p")),) * 3)
    assert compare(two, tied, axis="", case="", request="") is None
    assert compare(two, swapped, axis="", case="", request="").part == "top_logprobs"


def test_parts_that_were_not_asked_for_are_left_out():
    assert compare(answer(), Answer((1, 2, 3)), axis="", case="", request="") is None
    assert compare(answer(), Answer((1, 2, 4)), axis="", case="", request="").part == "token"


def test_after_drops_every_part():
    rest = answer(top=(((1, "a"),), ((2, "b"),), ((3, "c"),))).after(2)
    assert (rest.tokens, len(rest.logprobs), rest.top) == ((3,), 1, (((3, "c"),),))


def test_fp32_logprobs_survive_json():
    values = torch.randn(1000).neg().exp().log().tolist()
    assert [hex_bits(v) for v in json.loads(json.dumps(values))] == [v.hex() for v in values]


def test_native_answer_and_abort():
    meta = {
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [[-0.5, 7, None], [None, 8, None]],
        "output_top_logprobs": [[[-0.5, 7, None]], [[None, 8, None]]],
        "cached_tokens": 3,
    }
    got = native_answer({"output_ids": [7, 8], "meta_info": meta})
    assert got == Answer(
        (7, 8), ((-0.5).hex(), "null"), (((7, "-0x1.0000000000000p-1"),), ((8, "null"),)), 3
    )
    with pytest.raises(ProbeError, match="aborted"):
        native_answer({"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}})


@pytest.mark.parametrize("incremental", [False, True], ids=["cumulative", "incremental"])
def test_streams_are_joined(incremental):
    def event(i):
        span = slice(i, i + 1) if incremental else slice(0, i + 1)
        meta = {
            "completion_tokens": i + 1,
            "output_token_logprobs": [[-1.0, 5, None], [-2.0, 6, None]][span],
        }
        return {"output_ids": [5, 6][span], "meta_info": meta}

    assert native_answer(joined_stream([event(0), event(1)])).tokens == (5, 6)
    assert len(native_answer(joined_stream([event(0), event(1)])).logprobs) == 2


# Verdicts


@pytest.mark.parametrize(
    "requests, mismatches, claimed, expected",
    [
        (0, 0, True, "not tested"),
        (0, 0, None, "not tested"),
        (0, 0, False, "not claimed"),
        (5, 0, False, "bitwise"),
        (5, 1, False, "diverged"),
        (5, 1, None, "diverged"),
        (5, 0, None, "bitwise"),
    ],
)
def test_verdicts(requests, mismatches, claimed, expected):
    assert verdict(requests, mismatches, claimed) == expected


@pytest.mark.parametrize(
    "rows, passed",
    [
        ([row()], True),
        ([row(), row(mismatches=1)], False),
        ([row(), row(claimed=False, mismatches=1)], True),
        ([row(), row(requests=0)], False),
        ([row(), row(requests=0, excused=True)], True),
        ([row(), row(requests=0, driven=False)], True),
        ([row(requests=0, excused=True)], False),
        ([row(claimed=None, mismatches=1)], False),
        ([row(claimed=None), row(claimed=None, requests=0)], True),
        ([row(claimed=False)], False),
        ([], False),
    ],
    ids=[
        "bitwise",
        "claimed-diverged",
        "unclaimed-diverged",
        "claimed-untested",
        "nothing-to-vary",
        "not-chosen",
        "nothing-tested",
        "stock-diverged",
        "stock-untested",
        "nothing-claimed",
        "empty",
    ],
)
def test_passed(rows, passed):
    assert report(rows).passed is passed


def test_tally_counts_and_keeps_the_first():
    tally = Tally(Axis.BATCH_SIZE)
    tally.see("c1", "p", answer(), answer())
    tally.see("c2", "p", answer(), answer(logprobs=(-1.0, -2.0, -4.0)))
    tally.see("c3", "q", answer(), answer(tokens=(9, 2, 3)))
    got = tally.result(frozenset({"batch_size"}), driven=True, reason="")
    assert (got.requests, got.mismatches, got.verdict) == (3, 2, "diverged")
    assert (got.first.case, got.unique_tokens, got.unique_logprobs) == ("c2", 2, 2)
    json.dumps(got.to_json())


# Tables


def test_table_shows_key_counts_and_divergence():
    found = compare(
        answer(), answer(tokens=(1, 5, 3)), axis="batch_size", case="9", request="ids-4"
    )
    text = report([row(), row(mismatches=1, first=found), row(Axis.RESTART, requests=0)]).table()
    assert "key 0123456789ab" in text.splitlines()[0]
    assert "expected id 2" in text and "found id 5" in text and "ids-4" in text
    assert text.splitlines()[-1].startswith("FAILED: 1 axes bitwise, 1 diverged")


# Prompts and plans


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


def test_pools_share_their_beginning():
    prompts = context().prompts
    small, large = prompts.pool(3), prompts.pool(33)
    assert large[:3] == small and large[0] == prompts.subject


def test_first_tokens_avoid_the_texts():
    f = facts(vocab_size=8)
    prompts = Prompts(f, 0, [("x", [3, 1]), ("y", [5])])
    assert {prompts.random(f"p{i}", 2).ids[0] for i in range(6)} == {0, 1, 2, 4, 6, 7}


def test_small_vocabularies_are_used_again_rather_than_left():
    prompts = Prompts(facts(vocab_size=2), 0, [])
    assert {prompts.random(f"p{i}", 3).ids[0] for i in range(9)} == {0, 1}


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


# Two reports, and the command line


def stored(key="k", tokens=(1, 2), prompt="d", name="p"):
    entry = {"prompt": prompt, "tokens": list(tokens), "logprobs": ["0x1p-1"] * len(tokens)}
    return {"key": key, "answers": {name: entry}}


def test_reports_of_equal_key_are_compared():
    assert compare_reports(stored(), stored()).verdict == "bitwise"
    assert compare_reports(stored(), stored(tokens=(1, 3))).first.index == 1


@pytest.mark.parametrize(
    "a, b",
    [
        (stored(), stored(key="other")),
        (stored(key=None), stored(key=None)),
        (stored(), stored(prompt="another seed")),
        (stored(), stored(name="q")),
    ],
    ids=["keys-differ", "no-key", "other-prompt", "nothing-in-common"],
)
def test_incomparable_reports_are_refused(a, b):
    with pytest.raises(ProbeError, match="not comparable"):
        compare_reports(a, b)


def call(*argv) -> int:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return verb.run(parser.parse_args(argv))


def test_compare_verb(tmp_path, capsys):
    paths = [tmp_path / n for n in ("a.json", "b.json", "c.json")]
    for path, content in zip(paths, (stored(), stored(), stored(tokens=(4, 2))), strict=True):
        path.write_text(json.dumps(content))
    assert call("--compare", str(paths[0]), str(paths[1])) == 0
    assert call("--compare", str(paths[0]), str(paths[2])) == 1
    assert "restart: diverged" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, words",
    [
        ((), "either --url"),
        (("--url", "localhost:1"), "http://"),
        (("--url", "http://127.0.0.1:9"), "cannot reach"),
        (("--url", "http://127.0.0.1:9", "--axes", "speed"), "does not drive the axis 'speed'"),
        (("--url", "http://127.0.0.1:9", "--json", "/no/such/x.json"), "folder does not exist"),
        (("--compare", "/no/a.json", "/no/b.json"), "cannot read"),
    ],
    ids=["nothing", "no-scheme", "no-server", "axis", "folder", "file"],
)
def test_usage_errors_are_one_sentence_and_exit_2(argv, words, capsys):
    assert call(*argv) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


# sgl_det.testing


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool], ids=str
)
def test_bitwise_equal_tensors_pass(dtype):
    x = torch.arange(12).reshape(3, 4).to(dtype)
    assert_bitwise_equal(x.clone(), x)
    assert_bitwise_equal(x.t().contiguous().t(), x)
    assert_bitwise_equal(x[:0], x[:0])


def test_nan_equals_itself_and_zero_has_a_sign():
    assert_bitwise_equal(torch.tensor(float("nan")), torch.tensor(float("nan")))
    with pytest.raises(AssertionError, match=r"1 of 1 elements.*-0x0.0p\+0 \(0x80000000\)"):
        assert_bitwise_equal(torch.tensor(-0.0), torch.tensor(0.0))


def test_the_first_difference_is_named():
    x = torch.zeros(4, 5)
    y = x.clone()
    y[2, 3], y[3, 0] = 1.0, 2.0
    with pytest.raises(
        AssertionError, match=r"out: 2 of 20 .* at \(2, 3\): 0x1.0.*, expected 0x0.0"
    ):
        assert_bitwise_equal(y, x, "out")


def test_shape_and_dtype_come_first():
    with pytest.raises(AssertionError, match=r"shape is \(2,\), expected \(1, 2\)"):
        assert_bitwise_equal(torch.zeros(2), torch.zeros(1, 2))
    with pytest.raises(AssertionError, match="dtype is torch.float16"):
        assert_bitwise_equal(torch.zeros(2).half(), torch.zeros(2))


def test_first_divergence():
    assert (
        first_divergence(([1, 2], [-1.0, -2.0]), ([1, 2], ["-0x1.0000000000000p+0", -2.0])) is None
    )
    found = first_divergence(([1, 2], [-1.0, -2.0]), ([1], [-1.0]))
    assert (found.index, found.tokens) == (1, (2, None))
    assert first_divergence(([1, 2], None), ([1, 3], [0.0, 0.0])).tokens == (2, 3)
    with pytest.raises(ValueError, match="2 token ids and 1 logprobs"):
        first_divergence(([1, 2], [0.0]), ([1, 2], [0.0, 0.0]))
