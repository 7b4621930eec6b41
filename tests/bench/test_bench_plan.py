"""``sgl-det bench`` without servers: workloads, schedule, statistics, the runner and its limits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_det.bench import client, runner, schedule, stats, workloads
from sgl_det.bench.client import Sample
from sgl_det.bench.runner import Runner
from sgl_det.bench.workloads import CACHED, FULL, LOAD, QUICK, SATURATION, WORKLOADS, Workload

PAIR = ("normal", "sgl_det")
URLS = {"normal": "n", "deterministic": "d", "sgl_det": "o"}
TOOK = {"n": 2.0, "d": 3.0, "o": 1.6}


@pytest.fixture
def drive(monkeypatch, tmp_path):
    """Runs a plan on make-believe servers that need seconds of a clock which stands still else."""
    clock, sent = [0.0], []

    def send(url, w, seed, new=None, **other):
        took = TOOK[url] * (0.25 if new == 1 else 1.0)
        clock[0] += took
        sent.append((url, str(seed), new or w.new, other.get("rate")))
        return Sample(metrics={"seconds": took}, cached=w.prompt - 1 if w.kind == CACHED else 0)

    monkeypatch.setattr(client, "send_batch", send)
    monkeypatch.setattr(client, "send_load", lambda u, w, s, rate: send(u, w, s, rate=rate))
    monkeypatch.setattr(client, "flush", lambda url: sent.append((url, "flush", 0, None)))
    monkeypatch.setattr(runner.time, "monotonic", lambda: clock[0])

    def run(names, arms=PAIR, once=(), deadline=None):
        chosen = workloads.chosen(names)
        made = Runner(chosen, tmp_path / "lines.jsonl", deadline)
        made.run(schedule.plan(chosen, arms, once), URLS, lambda step: None)
        return made

    run.sent = sent
    return run


def test_quick_fits_nine_minutes_with_three_alternations_and_the_deterministic_arm_once():
    steps = schedule.plan(workloads.chosen(QUICK), PAIR, ("deterministic",))
    assert schedule.fixed_s() + schedule.total_s(steps) < 540
    for name in QUICK:
        mine = [s for s in steps if s.workload == name and s.counted]
        assert sum(set(PAIR) <= set(s.arms) for s in mine) >= 3
        assert sum("deterministic" in s.arms for s in mine) == 1


def test_the_full_suite_has_the_workloads_that_were_asked_for():
    full = workloads.chosen(FULL)
    labels = {n: w.label for n, w in full.items()}
    assert labels["throughput_64x4096"] == "64 x 4096/1024"
    assert labels["throughput_16x16384"] == "16 x 16384/512"
    assert labels["sequences_1000"] == "1000 x 100/90-110"
    assert labels["shared_prefix_chat"] == "128 x 8 of 2048 + 128/128"
    assert {w.of_capacity for w in full.values()} == {None, 0.5, 0.9}
    assert {full["decode_bs1_32k"].prompt, full["decode_bs4_32k"].prompt} == {32_768}
    assert (full["sampled_t1"].temperature, full["sampled_t1"].top_p) == (1.0, 0.95)
    for w in full.values():
        assert w.shared + w.prompt + w.new < 40_960


def test_capacity_is_measured_before_what_arrives_at_a_part_of_it():
    assert list(workloads.chosen(["decode_bs1", "poisson_90"])) == [
        "decode_bs1",
        SATURATION,
        "poisson_90",
    ]
    with pytest.raises(ValueError, match="no workload is named 'x'"):
        workloads.chosen(["x"])


def test_prompts_follow_from_the_seed_and_keep_to_their_lengths():
    w = WORKLOADS["poisson_50"]
    one, again, other = (workloads.prompts(w, seed) for seed in ("1 a", "1 a", "2 a"))
    assert one == again != other
    lengths = {len(ids) for ids, _ in one}
    assert w.least_prompt <= min(lengths) < max(lengths) <= w.prompt
    assert {w.least_new <= new <= w.new for _, new in one} == {True}
    chat = WORKLOADS["shared_prefix_chat"]
    heads = {tuple(ids[: chat.shared]) for ids, _ in workloads.prompts(chat, 0)}
    assert len(heads) == chat.groups


def test_every_workload_has_something_before_any_is_repeated_and_the_first_arm_changes():
    chosen = workloads.chosen(["decode_bs1", "throughput_256x1024"])
    steps = schedule.plan(chosen, PAIR, ("deterministic",))
    assert [(s.workload[:6], s.number) for s in steps] == [
        ("decode", 0),
        ("decode", 1),
        ("throug", 1),
        ("decode", 2),
        ("decode", 3),
        ("throug", 2),
        ("throug", 3),
    ]
    assert [s.arms[0] for s in steps if s.workload == "decode_bs1"] == [
        "sgl_det",
        "normal",
        "sgl_det",
        "normal",
    ]


def test_the_plan_says_what_does_not_fit():
    steps = schedule.plan(workloads.chosen(["throughput_256x1024"]), PAIR)
    lines = schedule.described([steps], schedule.fixed_s() + 200)
    assert sum("(does not fit)" in line for line in lines) == 1
    assert any("left out for lack of time: 1 rounds" in line for line in lines)


def test_the_time_of_a_server_that_comes_later_is_kept_free():
    chosen = workloads.chosen(["throughput_256x1024"])
    groups = [schedule.plan(chosen, PAIR), schedule.plan(chosen, (), ("deterministic",))]
    later = schedule.later_s(groups[1:])
    assert later > schedule.total_s(groups[1])
    lines = schedule.described(groups, schedule.fixed_s() + later + 200)
    late = [line for line in lines if "(does not fit)" in line]
    assert len(late) == 1 and "round 3: normal" in late[0]


def test_the_arms_take_turns_with_equal_prompts(drive):
    made = drive(["decode_bs1"], once=("deterministic",))
    counted = [m for m in made.measured if m["counted"]]
    assert [m["arm"] for m in counted if m["round"] > 1] == ["sgl_det", "normal", *PAIR]
    assert [m["round"] for m in counted if m["arm"] == "deterministic"] == [1]
    by = {url: [s for u, s, *_ in drive.sent if u == url and s != "flush"] for url in "no"}
    assert by["n"] == by["o"] and len(set(by["n"])) == 4
    lines = [json.loads(x) for x in made.lines.read_text().splitlines()]
    assert lines == made.measured


def test_long_decode_hits_the_cache_and_leaves_the_prefill_out(drive):
    made = drive(["decode_bs1_32k"])
    seconds = {m["arm"]: m["metrics"]["seconds"] for m in made.measured}
    assert seconds == {"normal": 1.5, "sgl_det": pytest.approx(1.2)}
    assert sum(s == "flush" for _, s, *_ in drive.sent) == 2  # once an arm, not once a round


def test_a_flush_between_its_rounds_has_the_prompts_put_into_the_cache_again(drive):
    drive(["decode_bs1_32k", "decode_bs1"])
    mine = [s for u, s, new, _ in drive.sent if u == "n" and new == 1]
    assert len(mine) == 2 + 4  # prepared before round 0 and before round 2, and once a round


def test_arrivals_are_a_part_of_what_the_normal_arm_reached(drive):
    drive(["poisson_50"])
    rates = {rate for _, seed, _, rate in drive.sent if seed == "1 poisson_50"}
    assert rates == {0.5 * WORKLOADS[SATURATION].many / TOOK["n"]}


def test_no_step_begins_that_may_end_too_late(drive):
    made = drive(["decode_bs1", "throughput_256x1024"], deadline=14.0)
    assert {m["workload"] for m in made.measured} == {"decode_bs1"}
    assert made.skipped == {"throughput_256x1024": 3, "decode_bs1": 1}


def test_only_one_arm_is_awake_while_it_is_measured(drive, tmp_path):
    awake = []
    chosen = workloads.chosen(["decode_bs1"])

    class Alone:
        def __init__(self, arm):
            self.arm = arm

        def __enter__(self):
            awake.append(self.arm)

        def __exit__(self, *_exc):
            pass

    made = Runner(chosen, tmp_path / "x.jsonl", None, Alone)
    made.run(schedule.plan(chosen, PAIR), URLS, lambda step: None)
    assert awake == [m["arm"] for m in made.measured]


def test_smaller_workloads_for_a_cpu():
    w = WORKLOADS["throughput_256x1024"].scaled(32)
    assert (w.many, w.prompt, w.new, w.about_s) == (8, 32, 32, 0.0)
    assert WORKLOADS["prefill_8x16384"].scaled(32).new == 1
    assert w.scaled(1) is w
    assert max(max(ids) for ids, _ in workloads.prompts(w.within(100), 0)) < 100
    assert w.within(10**6).ids == w.ids
    chat = WORKLOADS["shared_prefix_chat"].scaled(32)
    assert chat.many >= 2 * chat.groups and chat.shared == 64


@pytest.mark.parametrize("name", [n for n, w in WORKLOADS.items() if w.kind == LOAD])
def test_loads_are_of_single_requests(name):
    assert isinstance(WORKLOADS[name], Workload) and WORKLOADS[name].many > 1


def test_statistics():
    assert stats.spread([3.0, 1.0, 2.0]) == {"value": 2.0, "min": 1.0, "max": 3.0}
    found = stats.paired({1: 1.1, 2: 2.4, 9: 7.0}, {1: 1.0, 2: 2.0, 3: 5.0})
    assert found == {"ratio": 1.15, "ratio_min": 1.1, "ratio_max": 1.2}
    assert stats.paired({1: 1.0}, {2: 1.0}) is None
    assert stats.percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert stats.quantiles([5.0])[-1] == 5.0


@pytest.mark.parametrize(
    "backend, case",
    [
        ("fa3", "decode_bs4_8k"),
        ("flashinfer", "prefill_128x513"),
        ("triton", "decode_bs1_512"),
        ("cpu", "prefill_1024"),
    ],
)
def test_the_script_of_each_backend_plans_its_own_cases(backend, case, tmp_path):
    script = Path(__file__).parents[2] / "benchmarks" / f"bench_{backend}.py"
    command = (sys.executable, str(script), "--plan", "--suite", "full", "--out", str(tmp_path))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"{case} round 1" in done.stdout
    assert not list(tmp_path.iterdir())
