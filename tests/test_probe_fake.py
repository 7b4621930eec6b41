"""The probe against a make-believe server in this process: what it sees, and how it ends."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web

from fake_server import KEY
from fake_sglang import SPLIT, Fake
from sgl_det.axis import Axis
from sgl_det.probe.client import ProbeError
from sgl_det.probe.runner import DRIVEN, probe


def drive(fake: Fake, **kwargs):
    async def main():
        runner = web.AppRunner(fake.app())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        try:
            url = f"http://127.0.0.1:{port}"
            return await probe(url, progress=False, **({"quick": True} | kwargs))
        finally:
            await runner.cleanup()

    return asyncio.run(main())


ALL = [str(a) for a in Axis]


@pytest.mark.parametrize("quick", [True, False], ids=["quick", "full"])
def test_a_function_of_the_prompt_passes(quick):
    report = drive(Fake(claims=ALL), quick=quick)
    assert report.passed, report.table()
    assert {r.verdict for r in report.rows if r.driven} == {"bitwise"}
    assert (report.key, report.subject["unique_logprobs"]) == (KEY, 1)
    assert report.subject["conditions"] > 20
    assert report.total["unique_tokens"] == report.total["prompts"]
    json.dumps(report.to_json())


@pytest.mark.parametrize(
    "leak, axis",
    [
        ("batch", Axis.BATCH_SIZE),
        ("batch", Axis.POSITION_IN_BATCH),
        ("cache", Axis.PREFIX_CACHE),
        ("prefill", Axis.PREFILL_VS_DECODE),
        ("stream", Axis.STREAMING),
        ("flags", Axis.SAMPLED),
    ],
)
def test_each_leak_is_seen_on_its_axis(leak, axis):
    report = drive(Fake(leak=leak), axes=[axis, Axis.RUN_TO_RUN])
    assert report.row(axis).verdict == "diverged"
    assert report.row(axis).first.actual_logprob.startswith("-0x1")
    assert report.row(Axis.RUN_TO_RUN).verdict == "bitwise"
    assert report.key is None and not report.passed


@pytest.mark.parametrize(
    "leak, axis, case",
    [
        ("split", Axis.PREFILL_VS_DECODE, f"rescored across {SPLIT}"),
        ("decoded", Axis.PREFIX_CACHE, "turn 2 after 61 and 8 generated"),
    ],
)
def test_leaks_at_an_edge_are_seen(leak, axis, case):
    report = drive(Fake(leak=leak, claims=ALL), axes=[axis, Axis.BATCH_SIZE], quick=False)
    assert report.row(axis).first.case == case
    assert report.row(Axis.BATCH_SIZE).verdict == "bitwise"
    assert report.server["edges"] == [64, 128, SPLIT, 2 * SPLIT]


def test_what_does_not_begin_in_time_is_left_out_and_said():
    axes = [Axis.RUN_TO_RUN, Axis.STREAMING]
    report = drive(Fake(claims=ALL), axes=axes, limit_s=0.0)
    assert {report.row(a).verdict for a in axes} == {"not tested"} and not report.passed
    assert report.row(Axis.RUN_TO_RUN).note == "6 cases left out, the time was over"


def test_an_axis_that_is_not_claimed_may_diverge():
    claims = [a for a in ALL if a != Axis.PREFIX_CACHE]
    report = drive(Fake("cache", claims), axes=[Axis.PREFIX_CACHE, Axis.RUN_TO_RUN])
    row = report.row(Axis.PREFIX_CACHE)
    assert (row.verdict, row.claimed, report.passed) == ("diverged", False, True)


def test_without_a_prefix_cache_its_axis_is_not_tested():
    fake = Fake(claims=ALL)
    fake.radix = False
    report = drive(fake, axes=[Axis.PREFIX_CACHE, Axis.RUN_TO_RUN])
    row = report.row(Axis.PREFIX_CACHE)
    assert (row.verdict, row.requests, row.note) == ("not tested", 0, "the prefix cache is off")
    assert report.passed


@pytest.mark.parametrize("leak, claims", [("no grammar", ALL), ("grammar", None)])
def test_without_a_grammar_backend_its_axis_is_not_tested(leak, claims):
    """Stock SGLang has one, but no masks on a CPU, and ends."""
    report = drive(Fake(leak, claims), axes=[Axis.STRUCTURED, Axis.SAMPLED])
    row = report.row(Axis.STRUCTURED)
    assert row.verdict == "not tested" and "no grammar backend" in row.note
    assert report.row(Axis.SAMPLED).verdict == "bitwise" and report.passed


def test_grammars_of_neighbours_are_seen():
    report = drive(Fake("grammar", ALL), axes=[Axis.STRUCTURED, Axis.RUN_TO_RUN])
    assert report.row(Axis.STRUCTURED).verdict == "diverged" and not report.passed


def test_min_p_goes_only_to_a_server_that_makes_claims():
    """With a seed it ends a stock one."""
    for claims, expected in ((None, False), (ALL, True)):
        fake, seen = Fake(claims=claims), []
        original = fake.reply
        fake.reply = lambda body, n: seen.append(body["sampling_params"]) or original(body, n)  # noqa: B023
        drive(fake, axes=[Axis.SAMPLED, Axis.STRUCTURED], quick=False)
        assert any("min_p" in x for x in seen) == expected


def test_a_claimed_cache_that_never_hits_fails():
    fake = Fake(claims=ALL)
    original = fake.reply

    def forgetful(body, n):
        fake.forget()
        return original(body, n)

    fake.reply = forgetful
    report = drive(fake, axes=[Axis.PREFIX_CACHE, Axis.RUN_TO_RUN])
    assert report.row(Axis.PREFIX_CACHE).verdict == "not tested" and not report.passed


def test_a_server_that_dies_ends_the_probe_with_one_sentence():
    with pytest.raises(ProbeError, match=r"cannot reach .*/generate while .*check the URL"):
        drive(Fake(die_after=30))


def test_a_key_that_changes_ends_the_probe():
    fake = Fake(claims=ALL)
    original = fake.reply

    def reply(body, n):
        fake.key = KEY if fake.served < 20 else "ba9876543210"
        return original(body, n)

    fake.reply = reply
    with pytest.raises(ProbeError, match="numerics key changed from 0123456789ab to ba9876543210"):
        drive(fake)


def test_every_driven_axis_sends_requests():
    report = drive(Fake(claims=ALL))
    assert all(report.row(a).requests > 0 for a in DRIVEN)
