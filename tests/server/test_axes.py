"""The real CPU server through the probe, with stock SGLang as the control that must diverge."""

from __future__ import annotations

import pytest

from sgl_det.axis import Axis
from sgl_det.probe import compare_reports, run_probe

pytestmark = pytest.mark.server
CLAIMED = (
    Axis.RUN_TO_RUN,
    Axis.BATCH_SIZE,
    Axis.BATCH_COMPOSITION,
    Axis.POSITION_IN_BATCH,
    Axis.LONG_BESIDE_SHORT,
    Axis.ARRIVAL_ORDER,
    Axis.CHUNKED_PREFILL,
    Axis.PREFIX_CACHE,
    Axis.PREFILL_VS_DECODE,
    Axis.STREAMING,
    Axis.LOGPROB_NEIGHBOUR,
    Axis.SAMPLED,
    Axis.STRUCTURED,
)


@pytest.fixture(scope="module")
def ours(sgl_det_server):
    return run_probe(sgl_det_server.url, quick=True, progress=False)


@pytest.fixture(scope="module")
def stock(stock_server):
    return run_probe(stock_server.url, quick=True, progress=False)


@pytest.mark.parametrize("axis", CLAIMED, ids=str)
def test_claimed_axis_is_bitwise(ours, axis):
    row = ours.row(axis)
    assert row.claimed and row.requests > 0, row
    assert row.verdict == "bitwise", str(row.first)


def test_one_prompt_has_one_answer(ours):
    assert ours.subject["conditions"] > 10
    assert ours.subject["unique_tokens"] == ours.subject["unique_logprobs"] == 1


def test_control_diverges_in_tokens_and_logprobs(stock):
    assert stock.subject["unique_tokens"] > 1 and stock.subject["unique_logprobs"] > 1
    diverged = {r.axis for r in stock.rows if r.verdict == "diverged"}
    assert {Axis.BATCH_SIZE, Axis.BATCH_COMPOSITION} <= diverged


def test_restart_is_bitwise(ours, restarted_server):
    again = run_probe(
        restarted_server.url, quick=True, progress=False, axes=[Axis.RUN_TO_RUN, Axis.STREAMING]
    )
    assert again.key == ours.key
    row = compare_reports(ours.to_json(), again.to_json())
    assert row.requests > 0 and row.verdict == "bitwise", str(row.first)


@pytest.mark.long
def test_full_probe(sgl_det_server):
    report = run_probe(sgl_det_server.url, progress=False)
    assert report.passed, report.table()
