"""The probe's comparison, verdicts and tables, without a server.

Longer than 300 lines because the cases of one package belong together.
"""

from __future__ import annotations

import json
import math

import pytest
import torch

from sgl_det.axis import Axis
from sgl_det.probe.client import ProbeError
from sgl_det.probe.compare import Answer, compare, hex_bits
from sgl_det.probe.replies import joined_stream, native_answer
from sgl_det.probe.table import AxisResult, Report, Tally, verdict


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
