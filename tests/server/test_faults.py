"""What goes wrong around a server ends it, or passes, in an orderly way, and changes no bit.

Two servers start side by side: one that is watched (metrics, and a canary every second), and a
small one with little KV memory. Both end in their last test, and a third one takes their place.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor, wait

import aiohttp
import pytest
import requests

import faults
import sampled
from faults import answers, body, events, nothing_left, scheduler_of, series, tree, until
from sgl_det.kernels import cpu_build
from sgl_det.probe.replies import joined_stream
from sgl_det.server_process import ServerProcess, running
from support import CPU, arguments

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]
KV_TOKENS, DRAIN_S = 2048, 15
OURS = "sgl_det.launch_server"


@pytest.fixture(scope="module")
def both(demo_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    argv = (*arguments(demo_model), "--enable-metrics")
    found = {
        "watched": ServerProcess(
            OURS,
            (*argv, "--det-canary-seconds", "0.5"),
            log=folder / "watched.log",
            env={**CPU, **faults.plugin(folder / "plugin", faults.OTHER_KERNEL)},
        ),
        "small": ServerProcess(
            OURS,
            (*argv, "--max-total-tokens", str(KV_TOKENS), "--det-drain-seconds", str(DRAIN_S)),
            log=folder / "small.log",
            env=CPU,
        ),
    }
    with running(found.values(), 600):
        yield found


@pytest.fixture(scope="module")
def watched(both):
    return both["watched"]


@pytest.fixture(scope="module")
def small(both):
    return both["small"]


@pytest.fixture(scope="module")
def oracle(both):
    """The bits of both servers before anything went wrong; they are the same."""
    found = [answers(server.url) for server in both.values()]
    assert found[0] == found[1]
    return found[0]


def test_metrics_tell_what_determinism_tells(watched):
    told, now = requests.get(f"{watched.url}/determinism", timeout=120).json(), series(watched.url)
    (info,) = [labels for labels in now if labels[0] == "sgl_det_info"]
    assert told["key"] in info and now[info] == 1
    claims = {labels[1]: v for labels, v in now.items() if labels[0] == "sgl_det_claimed"}
    assert claims == dict.fromkeys(told["not_claimed"], 0) | dict.fromkeys(told["claims"], 1)
    assert now[("sgl_det_refusals_lifted",)] == 0 == now[("sgl_det_problem",)]
    assert now[("sgl_det_self_test_seconds",)] == told["kernels"]["seconds"] > 0
    layers = {labels[2] for labels in now if labels[0] == "sgl_det_kernel_info"}
    assert layers == {f"linear {x}" for x in told["kernels"]["cpu"]["linear"]}
    (ready,) = events(watched, "ready")
    assert (ready["key"], ready["claims"]) == (told["key"], told["claims"])


def test_canary_runs_in_the_idle_server_and_changes_no_bit(watched, oracle):
    def runs():
        return series(watched.url)[("sgl_det_canary_runs_total",)]

    before = runs()
    until(lambda: runs() >= before + 9)  # each case once, and more
    assert answers(watched.url) == oracle
    assert series(watched.url)[("sgl_det_canary_mismatches_total",)] == 0


def test_control_a_kernel_that_changes_fails_the_health(watched):
    assert requests.get(f"{watched.url}/health", timeout=60).status_code == 200
    scheduler_of(watched).send_signal(signal.SIGUSR2)

    def failing():
        answer = requests.get(f"{watched.url}/health", timeout=60)
        return answer.status_code == 503 and answer.json()

    answer = until(failing)
    assert "no longer gives the canonical bits" in answer["error"]["message"]
    told, now = requests.get(f"{watched.url}/determinism", timeout=120).json(), series(watched.url)
    assert told["claims"] == [] and "no longer gives" in told["problem"]
    assert now[("sgl_det_canary_mismatches_total",)] >= 1 == now[("sgl_det_problem",)]
    assert not any(v for labels, v in now.items() if labels[0] == "sgl_det_claimed")
    assert events(watched, "canary_mismatch")[0]["mismatches"] == 1


def test_a_killed_scheduler_ends_the_server(watched):
    processes = tree(watched)
    asked = body("plain", stream=True)
    asked["sampling_params"]["max_new_tokens"] = 400
    with requests.post(f"{watched.url}/generate", json=asked, stream=True, timeout=120) as answer:
        lines = answer.iter_lines()
        next(lines)
        scheduler_of(watched).kill()
        with pytest.raises(requests.RequestException):
            list(lines)
    assert watched.wait_exit(90) == 1
    assert until(lambda: nothing_left(processes))
    (stopped,) = events(watched, "stopped")
    assert not stopped["asked"] and "without a reason" in stopped["reason"]
    assert "exit code -9" in watched.log.read_text()


def test_a_flood_of_clients_of_whom_many_leave(small, oracle):
    """Hundreds of connections at once; a third of them close without waiting for an answer."""

    async def one(session, i):
        leaves = i % 3 == 0
        params = {"max_new_tokens": 300 if leaves else 2 + i % 9, "temperature": i % 2}
        asked = {"input_ids": sampled.prompt(f"flood {i}", 1 + i % 60), "stream": i % 5 == 0}
        asked["sampling_params"] = params | {"ignore_eos": True}
        try:
            async with asyncio.timeout(0.3 if leaves else 300):
                async with session.post(f"{small.url}/generate", json=asked) as answer:
                    await answer.read()
                    return answer.status
        except TimeoutError:
            assert leaves
            return None

    async def flood():
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            return await asyncio.gather(*(one(session, i) for i in range(400)))

    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(lambda: asyncio.run(flood()))
        found = answers(small.url)
        statuses = under_way.result()
    assert [i % 3 == 0 for i in range(400)] == [s is None for s in statuses]
    assert {*statuses} == {200, None}
    assert found == oracle == answers(small.url)


def test_more_tokens_than_the_kv_memory_has(small, oracle):
    """Together they wait or are retracted; alone, one that can never fit is refused."""
    prompts = [sampled.prompt(f"long {i}", 200) for i in range(12)]
    asked = {"sampling_params": {"temperature": 0, "max_new_tokens": 100, "ignore_eos": True}}
    asked |= {"return_logprob": True, "top_logprobs_num": 3}
    alone = sampled.bits(sampled.post(small.url, "/generate", asked | {"input_ids": prompts[7]}))
    together = sampled.post(small.url, "/generate", asked | {"input_ids": prompts})
    assert len(together) == 12 and sampled.bits(together[7]) == alone
    too_long = {"input_ids": sampled.prompt("too long", KV_TOKENS + 100)}
    answer = requests.post(f"{small.url}/generate", json=asked | too_long, timeout=120)
    assert answer.status_code == 400 and str(KV_TOKENS + 100) in answer.text, answer.text
    assert answers(small.url) == oracle


def test_readers_that_stop_reading_stop_nobody_else(small, oracle):
    with faults.stuck_reader(small), faults.stuck_reader(small), faults.stuck_reader(small):
        assert answers(small.url) == oracle
    until(lambda: requests.post(f"{small.url}/flush_cache", timeout=60).status_code == 200)
    assert answers(small.url) == oracle


def test_sigterm_under_load(small, oracle):
    """What runs is finished with the bits it would have had, but nobody holds up the end."""
    processes, parts = tree(small), {}

    def read(name, begun):
        asked = body(name, stream=True)
        with requests.post(f"{small.url}/generate", json=asked, stream=True, timeout=120) as answer:
            lines = answer.iter_lines()
            parts[name] = [next(lines)]
            begun()
            parts[name] += lines

    def refused():
        one = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
        answer = requests.post(f"{small.url}/generate", json=one, timeout=60)
        return answer.status_code == 503 and "shutting down" in answer.text

    with faults.stuck_reader(small, 1500), ThreadPoolExecutor(len(faults.NAMES)) as pool:
        begun = []
        reads = [pool.submit(read, n, lambda: begun.append(1)) for n in faults.NAMES]
        until(lambda: len(begun) == len(faults.NAMES))
        os.kill(small.pid, signal.SIGTERM)
        began = time.monotonic()
        until(refused)
        wait(reads)
        # From here on the answer that nobody reads does not end by itself.
        pause = requests.post(
            f"{small.url}/pause_generation", json={"mode": "in_place"}, timeout=60
        )
        assert pause.status_code == 200
        assert small.wait_exit(120) == 0
    assert time.monotonic() - began > DRAIN_S
    for name, lines in parts.items():
        read = [json.loads(x[6:]) for x in lines if x.startswith(b"data: {")]
        assert sampled.bits(joined_stream(read)) == oracle[name], name
    assert set(parts) == set(faults.NAMES) and until(lambda: nothing_left(processes))
    (stopped,) = events(small, "stopped")
    assert stopped["asked"]


def test_after_a_restart_with_a_damaged_kernel_the_bits_are_the_same(demo_model, oracle, tmp_path):
    """The compiled kernels were cut short on disk. In the end the launcher is killed."""
    kept = cpu_build.build()
    damaged = tmp_path / "sgl_det" / kept.name
    damaged.parent.mkdir()
    shutil.copy(kept, damaged)
    os.truncate(damaged, kept.stat().st_size // 2)
    env = {**CPU, "XDG_CACHE_HOME": str(tmp_path)}
    server = ServerProcess(OURS, arguments(demo_model), log=tmp_path / "log", env=env)
    with running([server], 600):
        assert answers(server.url) == oracle
        assert "it is compiled anew" in server.log.read_text()
        processes = tree(server)
        os.kill(server.pid, signal.SIGKILL)
        assert server.wait_exit(30) == -signal.SIGKILL
        until(lambda: nothing_left(processes))


@pytest.mark.long
@pytest.mark.skipif(not faults.may_mount(), reason="needs the right to mount a file system")
def test_a_full_disk_under_the_cache_is_one_sentence(demo_model, tmp_path):
    with faults.full_disk(tmp_path / "cache") as cache:
        env = {**CPU, "XDG_CACHE_HOME": str(cache)}
        server = ServerProcess(OURS, arguments(demo_model), log=tmp_path / "log", env=env).start()
        try:
            processes = tree(server)
            assert server.wait_exit(600) == 1
        finally:
            server.stop()
    (refused,) = events(server, "refused")
    assert "No space left on device" in refused["reason"] and "XDG_CACHE_HOME" in refused["reason"]
    assert until(lambda: nothing_left(processes))
