"""What happens to a server, or to a neighbour, in the middle of an answer changes none of its bits.

The targets sample in several ways, and each has a seed; `sampled` has what they send.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager

import pytest
import requests

import sampled
from sampled import TIMEOUT, bits, parameters, post, prompt
from sgl_det.probe.replies import joined_stream
from sgl_det.server_process import ServerProcess, running
from support import CPU, arguments

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]
NAMES = ("plain", "filters", "greedy", "penalties")
# Long enough to be under way when something happens.
NEW = 48
FOREVER = {"max_new_tokens": 1500}
LONG = {"max_new_tokens": 300, "ignore_eos": True, "temperature": 1.0}


def body(name, **sampling):
    params = {**parameters(name), "max_new_tokens": NEW, **sampling}
    ask = {"return_logprob": True, "top_logprobs_num": 3}
    return {"input_ids": prompt(name), "sampling_params": params, **ask}


def replies_of(url, **more):
    """Of all targets at once, each in a request of its own."""
    found = {}

    def one(name):
        found[name] = post(url, "/generate", body(name) | more)

    threads = [threading.Thread(target=one, args=(name,)) for name in NAMES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == set(NAMES)
    return found


def answers(url):
    """Their bits."""
    return {name: bits(reply) for name, reply in replies_of(url).items()}


@pytest.fixture(scope="module")
def oracle(sgl_det_server):
    """Each target alone, on a cold cache."""
    found = {}
    for name in NAMES:
        sampled.flush(sgl_det_server.url)
        found[name] = bits(post(sgl_det_server.url, "/generate", body(name)))
    return found


@contextmanager
def meanwhile(happen, *, every=0.05):
    """Calls happen(i) again and again beside what is done inside; at least twice."""
    over, problems = threading.Event(), []

    def run():
        i = 0
        while not over.is_set() or i < 2:
            try:
                happen(i)
            except Exception as error:  # shown where the test ends
                problems.append(error)
                return
            i += 1
            time.sleep(every)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert not problems, problems


@contextmanager
def neighbour(url, rid=None, name="neighbour"):
    """A stream that another request is read from; its first part is there."""
    asked = {"input_ids": prompt(name), "sampling_params": LONG, "stream": True}
    asked |= {"rid": rid} if rid else {}
    with requests.post(f"{url}/generate", json=asked, stream=True, timeout=TIMEOUT) as answer:
        lines = answer.iter_lines()
        next(lines)
        yield lines


def call(url, route, **given):
    answer = requests.post(url + route, json=given, timeout=TIMEOUT)
    assert answer.status_code < 500, f"{route}: {answer.status_code} {answer.text[:300]}"
    return answer


def test_neighbours_are_aborted(sgl_det_server, oracle):
    url, ended = sgl_det_server.url, []

    def abort(i):
        with neighbour(url, f"mine-{i}", f"aborted {i}") as lines:
            call(url, "/abort_request", rid=f"mine-{i}")
            ended.append(b'"abort"' in b"".join(lines))

    with meanwhile(abort):
        found = answers(url)
    assert found == oracle and all(ended)


def test_clients_of_neighbours_disconnect(sgl_det_server, oracle):
    def leave(i):
        with neighbour(sgl_det_server.url, name=f"left {i}"):
            pass  # the connection is closed while the answer goes on

    with meanwhile(leave):
        found = answers(sgl_det_server.url)
    assert found == oracle


def test_the_cache_is_flushed(sgl_det_server, oracle):
    """While requests run the server refuses; between them it does not."""
    with meanwhile(lambda _: call(sgl_det_server.url, "/flush_cache")):
        found = [answers(sgl_det_server.url) for _ in range(2)]
    assert found == [oracle, oracle]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_generation_is_paused_and_goes_on(sgl_det_server, oracle, mode):
    url = sgl_det_server.url

    def pause(_):
        assert call(url, "/pause_generation", mode=mode).status_code == 200
        if mode == "retract":
            call(url, "/flush_cache")
        assert call(url, "/continue_generation").status_code == 200

    with meanwhile(pause, every=0.2):
        found = answers(url)
    assert found == oracle


@pytest.mark.parametrize("interval", [1, 3, 100])
def test_streams_of_any_interval_are_the_same_answer(sgl_det_server, oracle, interval):
    for name in NAMES:
        asked = body(name, stream_interval=interval) | {"stream": True}
        answer = requests.post(f"{sgl_det_server.url}/generate", json=asked, timeout=TIMEOUT)
        parts = [x[6:] for x in answer.text.splitlines() if x.startswith("data: {")]
        assert bits(joined_stream([json.loads(x) for x in parts])) == oracle[name], name


def test_more_requests_than_may_run(sgl_det_server, oracle):
    """The server runs 64 at once; the others wait."""
    url = sgl_det_server.url
    crowd = [prompt(f"crowd {i}", 2 + i % 5) for i in range(90)]
    short = {"max_new_tokens": 6, "ignore_eos": True, "temperature": 1.0, "top_p": 0.9}

    def fill(_):
        post(url, "/generate", {"input_ids": crowd, "sampling_params": short})

    with meanwhile(fill):
        found = answers(url)
    assert found == oracle


@contextmanager
def server_with(model, log, *flags, **environ):
    """A server of the same model with more flags."""
    argv = (*arguments(model), *flags)
    server = ServerProcess("sgl_det.launch_server", argv, log=log, env={**CPU, **environ})
    with running([server], 400):
        yield server.url


@pytest.mark.long
def test_other_schedules_give_the_same_bits(demo_model, oracle, tmp_path):
    """Without overlap, one or two requests at a time, and with small chunks."""
    flags = {
        "no overlap": ("--disable-overlap-schedule",),
        "few": ("--max-running-requests", "2"),
        "chunks": ("--chunked-prefill-size", "16", "--schedule-conservativeness", "0.3"),
    }
    for name, more in flags.items():
        with server_with(demo_model, tmp_path / name, *more) as url:
            assert answers(url) == oracle, name


@pytest.mark.long
def test_requests_that_give_way_to_others_keep_their_bits(demo_model, oracle, tmp_path):
    """Preempted by priority: computed anew later, what they had generated as part of a prompt."""
    flags = ("--enable-priority-scheduling", "--max-running-requests", "4")
    flags = (*flags, "--priority-scheduling-preemption-threshold", "5")
    short = {"max_new_tokens": 6, "ignore_eos": True, "temperature": 1.0, "top_p": 0.9}
    with server_with(demo_model, tmp_path / "log", *flags) as url:

        def urge(i):
            crowd = {"input_ids": [prompt(f"urgent {i} {k}") for k in range(2)], "priority": 10}
            post(url, "/generate", {**crowd, "sampling_params": short})

        found, gave_way = {}, 0
        for _ in range(3):
            with meanwhile(urge):
                replies = replies_of(url, priority=0)
            found = {name: bits(reply) for name, reply in replies.items()}
            assert found == oracle
            gave_way += sum(r["meta_info"]["num_retractions"] for r in replies.values())
    assert gave_way >= 3


@pytest.mark.long
def test_requests_that_run_out_of_time_change_no_bit(demo_model, oracle, tmp_path):
    """The server gives up on neighbours that wait or run for too long."""
    environ = {"SGLANG_REQ_RUNNING_TIMEOUT": "3", "SGLANG_REQ_WAITING_TIMEOUT": "2"}
    flags = ("--max-running-requests", "5")
    with server_with(demo_model, tmp_path / "log", *flags, **environ) as url:
        ended = []

        def linger(i):
            asked = {"input_ids": prompt(f"slow {i}"), "sampling_params": {**LONG, **FOREVER}}
            ended.append(requests.post(f"{url}/generate", json=asked, timeout=TIMEOUT).status_code)

        threads = [threading.Thread(target=linger, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for name in NAMES:
            assert bits(post(url, "/generate", body(name))) == oracle[name], name
        for thread in threads:
            thread.join()
    assert ended == [503] * 3
