"""``bench_server.py`` without servers: rounds, time limit, rows, and their place in the README."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from sgl_det import readme

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "server_rounds.py"
URLS = {"normal": "n", "sgl_det": "d"}
HEAD = {"backend": "fa3", "key": "k", "verdict": "bitwise"}
SECONDS = {"n": 2.0, "d": 1.6}


@pytest.fixture(scope="module")
def rounds():
    spec = importlib.util.spec_from_file_location("benchmarks_server_rounds", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their annotations up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bench(rounds, monkeypatch, tmp_path):
    """A Bench whose servers need 2 s and 1.6 s of a clock that stands still otherwise."""
    clock, sent = [0.0], []

    def send(url, w, seed, new=None):
        took = SECONDS[url] * (0.25 if new == 1 else 1.0)
        clock[0] += took
        sent.append((url, str(seed), new or w.new))
        return took, w.prompt - 1 if w.cached else 0

    monkeypatch.setattr(rounds, "send", send)
    monkeypatch.setattr(rounds, "flush", lambda url: sent.append((url, "flush", 0)))
    monkeypatch.setattr(rounds.time, "monotonic", lambda: clock[0])

    def make(*names, deadline=None):
        chosen = {n: rounds.WORKLOADS[n] for n in names}
        return rounds.Bench(URLS, chosen, tmp_path / "lines.jsonl", deadline)

    make.sent = sent
    return make


def run(bench):
    for name, numbers in bench.schedule():
        bench.run(name, numbers)
    return bench.rows(HEAD)


def test_workloads_of_the_issue_fit_the_pool_and_the_context(rounds):
    assert {"decode_bs1", "decode_bs16", "prefill_8x16384", "throughput_256x1024"} < set(
        rounds.DEFAULT
    )
    for w in rounds.WORKLOADS.values():
        assert w.prompt + w.new < 40_960
        assert min(w.many, 128) * w.prompt < 160_000


def test_every_workload_is_counted_once_before_any_is_repeated(bench):
    made = bench("decode_bs1", "throughput_256x1024")
    assert made.schedule() == [
        ("decode_bs1", [0, 1]),
        ("throughput_256x1024", [0]),
        ("decode_bs1", [2, 3]),
        ("throughput_256x1024", [1]),
    ]


def test_rows_are_medians_of_counted_rounds_and_the_arms_take_turns(bench):
    made = bench("decode_bs1", "throughput_256x1024")
    one, other = run(made)
    assert (one["rounds"], other["rounds"]) == (3, 2)
    assert (one["normal_s"], one["sgl_det_s"], one["speed_ratio"]) == (2.0, 1.6, 1.25)
    assert {"backend", "workload", "verdict", "key", "min", "max"} <= set(one)
    lines = [json.loads(x) for x in made.lines.read_text().splitlines()]
    assert [m["arm"] for m in lines] == ["normal", "sgl_det"] * 6
    assert sum(m["warm_up"] for m in lines) == 2
    prompts = [seed for url, seed, _ in bench.sent if url == "n" and seed != "flush"]
    assert len(set(prompts)) == 6


def test_long_decode_hits_the_cache_and_leaves_the_prefill_out(bench):
    made = bench("decode_bs1_32k")
    (row,) = run(made)
    assert (row["normal_s"], row["sgl_det_s"]) == (1.5, 1.2)
    flushes = [i for i, s in enumerate(bench.sent) if s == ("n", "flush", 0)]
    assert all(bench.sent[i + 1] == ("n", "decode_bs1_32k", 1) for i in flushes)
    assert len(flushes) == 2


def test_a_cache_that_is_off_has_no_ratio(bench):
    made = bench("decode_bs1_32k")
    run(made)
    for m in made.measured:
        m["cached"] = 0 if m["arm"] == "sgl_det" else m["cached"]
    (row,) = made.rows(HEAD)
    assert "speed_ratio" not in row and row["note"].startswith("sgl_det: prompts not read")


def test_a_red_verdict_has_no_ratio(bench):
    made = bench("decode_bs1")
    run(made)
    (row,) = made.rows(HEAD | {"verdict": "diverged"})
    assert "speed_ratio" not in row and row["normal_s"] == 2.0


def test_no_round_begins_that_may_end_too_late(bench):
    made = bench("decode_bs1", "throughput_256x1024", deadline=13.0)
    (row,) = run(made)
    assert (row["workload"], row["rounds"]) == ("decode_bs1", 2)
    assert made.skipped == {"throughput_256x1024": 2, "decode_bs1": 1}
    assert run(bench("decode_bs1", deadline=0.0)) == []


def test_smaller_workloads_for_a_cpu(rounds):
    w = rounds.WORKLOADS["throughput_256x1024"].scaled(32)
    assert (w.many, w.prompt, w.new, w.about_s) == (8, 32, 32, 0.0)
    assert rounds.WORKLOADS["prefill_8x16384"].scaled(32).new == 1
    assert w.scaled(1) is w


def test_the_readme_has_the_rows_and_the_memory_of_both_arms(bench, tmp_path, monkeypatch):
    found = {"rows": run(bench("decode_bs1"))}
    found["capacity"] = {
        "normal": {"max_total_num_tokens": 1000, "available_gb": 9.5},
        "sgl_det": {"max_total_num_tokens": 990, "available_gb": 9.1},
    }
    folder = tmp_path / "benchmarks" / "results" / "a-gpu"
    folder.mkdir(parents=True)
    (folder / "server-fa3.json").write_text(json.dumps(found))
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    table = readme.servers_table("a-gpu")
    assert "| fa3 | decode_bs1 | 3 | 2.0 | 1.6 | 1.25 (1.25 to 1.25) | bitwise | `k` |" in table
    assert "room for 1000 / 990 KV tokens (0.990), 9.5 / 9.1 GB left" in table
