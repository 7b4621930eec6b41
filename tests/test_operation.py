"""What an operator sees of a server: the board, the events, the series, and who gets a 503."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
import textwrap

import pytest

from sgl_det import board, endpoint, events, launch_hook, metrics, worker
from sgl_det.config import Config, split_argv


def test_a_child_leaves_a_sentence_and_the_first_one_stays():
    notes, path = board.create()
    assert notes.read("problem") == notes.read("failure") == ""
    script = f"from sgl_det import board; board.at({path!r}).write('failure', 'because ä')"
    subprocess.run([sys.executable, "-c", script], check=True)
    notes.write("failure", "and therefore")
    assert (notes.read("problem"), notes.read("failure")) == ("", "because ä")
    notes.write("problem", "x" * 100_000)
    assert set(notes.read("problem")) == {"x"} and notes.read("failure") == "because ä"


def test_a_board_goes_with_its_process():
    script = "from sgl_det import board; print(board.create()[1])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    with pytest.raises(OSError):
        board.at(done.stdout.strip())


def test_an_event_is_one_line_of_json_and_a_terminal_gets_none():
    out = io.StringIO()
    events.tell("ready", stream=out, key="0123", claims=["a"], why="two\nlines")
    (line,) = out.getvalue().splitlines()
    found = json.loads(line)
    assert found.pop("time").endswith("+00:00")
    assert found == {"sgl_det": "ready", "key": "0123", "claims": ["a"], "why": "two\nlines"}
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    events.tell("ready", stream=terminal)
    assert terminal.getvalue() == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_log_on_a_full_disk_stops_nothing():
    out = open("/dev/full", "w")
    events.tell("ready", stream=out)
    with pytest.raises(OSError):
        out.close()


@pytest.mark.parametrize("flag", ["--det-canary-seconds", "--det-drain-seconds"])
@pytest.mark.parametrize("value", ["-1", "inf", "nan"])
def test_times_are_checked(flag, value):
    with pytest.raises(ValueError, match=f"{flag} is .*; expected 0 or more"):
        split_argv([f"{flag}={value}"], "test")


@pytest.mark.parametrize("key", ["", "0123", "0123456789AB", "0123456789abcdef"])
def test_an_expected_key_that_no_server_can_have_is_refused_at_once(key):
    with pytest.raises(ValueError, match="--det-expect-key is .*12 hex digits"):
        split_argv(["--det-expect-key", key], "test")


def test_times_have_defaults():
    config, rest = split_argv(["--det-canary-seconds", "0", "--port", "1"], "test")
    assert (config.canary_s, config.drain_s) == (0, Config().drain_s) and rest == ["--port", "1"]


def test_kernels_of_a_gpu_are_one_series_for_each_layer_and_number_of_rows():
    report = {
        "linear": {
            "8x16 bf16": {"buckets": [{"rows": 1, "kernel": "a"}, {"rows": 9, "kernel": "b"}]}
        },
        "rows": {"norm 16": "sgl_det, because"},
    }
    assert list(metrics.kernels_chosen(report)) == [
        ("linear 8x16 bf16", "1", "a"),
        ("linear 8x16 bf16", "9", "b"),
        ("norm 16", "any", "sgl_det"),
    ]


def test_a_new_key_is_another_series_and_the_old_one_falls_to_zero(tmp_path):
    """In a process of its own, as the library decides when it is imported where it counts."""
    script = """
        from sgl_det import metrics
        from prometheus_client import CollectorRegistry, generate_latest, multiprocess
        numerics = dict.fromkeys(("backend", "sgl_det", "sglang", "dtype"), "x")
        for key, cases in (("old", 2), ("new", 5), ("new", 5)):
            kernels = {"seconds": 1.5, "canary": {"cases": cases, "mismatches": 0, "watched": 3}}
            metrics.of_worker({"key": key, "numerics": numerics, "kernels": kernels})
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        print(generate_latest(registry).decode())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
    )
    lines = [x for x in done.stdout.splitlines() if x.startswith("sgl_det_")]
    values = {x.rpartition(" ")[0]: float(x.rpartition(" ")[2]) for x in lines}
    info = {
        key: v for name, v in values.items() for key in ("old", "new") if f'key="{key}"' in name
    }
    assert info == {"old": 0, "new": 1}, done.stderr
    assert values["sgl_det_canary_runs_total"] == 5 and values["sgl_det_self_test_seconds"] == 1.5


def ask(path: str, source, *, ends: bool = False) -> int:
    """The status that a path has behind `Closed`; 200 is the application's own."""
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})

    async def send(message):
        sent.append(message)

    closed = endpoint.Closed(app, source, lambda: ends)
    asyncio.run(closed({"type": "http", "path": path}, None, send))
    return sent[0]["status"]


@pytest.mark.parametrize("path", ["/health", "/health_generate", "/generate", "/metrics"])
def test_who_gets_a_503(path):
    said = [""]
    source = endpoint.Determinism(lambda report: report, board=lambda: said[0])
    assert ask(path, source) == 200
    assert ask(path, source, ends=True) == (503 if path == "/generate" else 200)
    said[0] = "a kernel changed"
    assert ask(path, source) == (503 if path.startswith("/health") else 200)


def test_a_lost_patch_that_was_seen_fails_the_health(monkeypatch):
    told = []
    monkeypatch.setattr(events, "tell", lambda name, **fields: told.append((name, fields)))
    source = endpoint.Determinism(lambda report: report)
    source.take({"key": "a", "problem": None})
    source.take({"key": "b", "problem": "a patch is lost"})
    source.take({"key": "b", "problem": "a patch is lost"})
    assert ask("/health", source) == 503
    assert told == [
        ("key_changed", {"key": "b", "before": "a"}),
        ("problem", {"key": "b", "reason": "a patch is lost"}),
    ]


def test_the_reason_of_a_failing_worker_is_left_on_the_board(monkeypatch):
    for error, said in ((RuntimeError("no room\nmore"), "no room"), (KeyError(3), "KeyError: 3")):
        notes, _ = board.create()
        monkeypatch.setattr(worker, "board", notes)
        with pytest.raises(type(error)), worker.failures():
            raise error
        assert notes.read("failure") == said


@pytest.mark.parametrize("asked, status", [(True, 0), (False, 1)])
def test_the_process_ends_with_a_status_that_tells(monkeypatch, asked, status):
    ended = []
    monkeypatch.setattr(launch_hook, "_asked", asked)
    monkeypatch.setattr(launch_hook.os, "_exit", lambda code: ended.append(code))
    launch_hook.on_end(ended.append)
    launch_hook.end()
    launch_hook.on_end(None)
    assert ended == [asked, status]


def test_a_second_sigterm_ends_the_wait(monkeypatch):
    waits = []

    class Timer:
        def __init__(self, seconds, *_):
            waits.append(seconds)

        def start(self):
            assert self.daemon

    monkeypatch.setattr(launch_hook, "_asked", False)
    monkeypatch.setattr(launch_hook, "_drain_s", 0.0)
    monkeypatch.setattr(launch_hook.threading, "Timer", Timer)
    launch_hook.drain_for(7.0)
    launch_hook.terminate()
    launch_hook.terminate()
    assert waits == [7.0, 0] and launch_hook.asked()
