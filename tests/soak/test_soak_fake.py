"""The soak against a make-believe server: what it finds, what it records, and how it ends."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from aiohttp import web

from fake_server import KEY
from fake_soak import AFTER, CLAIMS, OTHER_KEY, FakeSoak
from sgl_det.probe.client import ProbeError
from sgl_det.soak.kinds import KINDS
from sgl_det.soak.replay import load, replay
from sgl_det.soak.result import BITWISE, DIVERGED, FAILED
from sgl_det.soak.runner import soak
from sgl_det.soak.wire import ServerFailed


def serve(fake: FakeSoak, use):
    """The result of the coroutine use(url), beside the server."""

    async def main():
        runner = web.AppRunner(fake.app())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            return await use(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}")
        finally:
            await runner.cleanup()

    return asyncio.run(main())


def drive(fake: FakeSoak, *, seconds: float = 4.0, requests: int = 44, **kwargs):
    options = {"minutes": seconds / 60, "requests": requests, "progress": False}
    return serve(fake, lambda url: soak(url, **options | kwargs))


def test_a_function_of_the_request_passes():
    result = drive(FakeSoak(), seconds=8.0)
    found = result.to_json()
    assert result.passed and result.verdict == BITWISE, result.text()
    assert set(found["kinds"]) == set(KINDS) and result.key == KEY
    assert all(k["requests"] and not k["mismatches"] for k in found["kinds"].values())
    assert min(found["ways"].values()) > 0 and len(found["ways"]) == 9
    assert found["aborts"] and found["disconnects"] and found["cut"] and found["flushes"]
    assert found["most_at_once"] > 16
    json.dumps(found)


def test_a_rare_leak_is_found_recorded_and_replayed(tmp_path):
    path = tmp_path / "record.json"
    result = drive(FakeSoak("batch"), seconds=60.0, record_file=path)
    assert result.verdict == DIVERGED and not result.passed and result.seconds < 50
    record = load(path)
    assert record["difference"]["part"] in ("logprob", "top_logprobs")
    assert record["key"] == KEY and record["body"] and record["found"] != record["expected"]
    assert record["acts"][record["target"]]["start"] == 0 and len(record["acts"]) > 1
    assert {n for a in record["acts"] for n in a["names"]} == set(record["entries"])
    again = serve(FakeSoak("batch"), lambda url: replay(url, record, times=20, progress=False))
    assert again.reproduced and again.cold is None
    fine = serve(FakeSoak(), lambda url: replay(url, record, times=3, progress=False))
    assert not fine.reproduced
    fixed = FakeSoak(key=OTHER_KEY)
    fine = serve(fixed, lambda url: replay(url, record, times=3, progress=False))
    assert not fine.reproduced and "recorded under key" in fine.text()


def test_mismatches_are_counted_where_asked():
    result = drive(FakeSoak("batch"), seconds=8.0, keep_going=True)
    assert result.to_json()["mismatches"] > 1 and result.seconds >= 8 and not result.passed


def test_a_stream_that_breaks_off_is_a_mismatch():
    result = drive(FakeSoak("breaks"), kinds=["greedy"], requests=4)
    assert result.verdict == DIVERGED and result.first["way"] == "stream"
    assert result.first["difference"]["part"] == "length"


def test_a_server_that_fails_ends_the_soak():
    result = drive(FakeSoak("dies"))
    assert (result.verdict, result.passed) == (FAILED, False)
    assert "answered 500: the scheduler is gone" in result.failure
    with pytest.raises(ServerFailed, match="answered 500"):
        drive(FakeSoak("dies"), requests=AFTER + 20)


def test_a_key_that_changes_is_an_error():
    with pytest.raises(ProbeError, match=f"key changed from {KEY} to {OTHER_KEY} while under load"):
        drive(FakeSoak("key"))


def test_only_claimed_kinds_are_sent_unless_asked():
    few = tuple(c for c in CLAIMS if c not in ("sampled", "structured"))
    result = drive(FakeSoak(claims=few), seconds=1.0)
    assert not {"seeded", "structured"} & set(result.kinds)
    assert "not sent: seeded, structured" in result.notes
    result = drive(FakeSoak(claims=few), seconds=2.0, requests=4, kinds=["seeded"])
    assert result.kinds == ["seeded"] and result.passed


def test_without_the_claim_no_more_tokens_than_the_pool_holds():
    fake = FakeSoak(claims=tuple(c for c in CLAIMS if c != "preemption"))
    result = drive(fake, seconds=3.0)
    assert "pressure" not in result.tally.phases
    assert any("does not claim preemption" in n for n in result.notes)


def test_a_server_without_claims_gets_every_kind_it_can():
    result = drive(FakeSoak(claims=None), seconds=1.0)
    assert set(result.kinds) == set(KINDS) - {"structured"} and result.key is None


def test_an_oracle_is_kept_and_refused_under_another_key(tmp_path):
    path = tmp_path / "oracle.json"
    first = drive(FakeSoak(), seconds=1.0, oracle_file=path)
    fake = FakeSoak()
    again = drive(fake, seconds=1.0, oracle_file=path)
    assert first.oracle == again.oracle and path.stat().st_size > 1000
    with pytest.raises(
        ProbeError, match=f"under the numerics key {KEY}, the server's is {OTHER_KEY}"
    ):
        drive(FakeSoak(key=OTHER_KEY), oracle_file=path)


def test_the_client_compares_thousands_of_tokens_a_second():
    """The make-believe server shares its processor."""
    kinds = ["greedy", "long_answer", "seeded"]
    start = time.process_time()
    result = drive(FakeSoak(), seconds=4.0, kinds=kinds)
    rate = result.to_json()["tokens"] / (time.process_time() - start)
    assert rate > 5000, rate
