"""``sgl-det bench``: rows, merging over sittings, tables, the report and the thousand."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from sgl_det.bench import arms, report, results, table, thousand, verdict
from sgl_det.bench.session import Session
from sgl_det.bench.workloads import WORKLOADS
from sgl_det.probe.table import AxisResult, Report

HEAD = {"backend": "fa3", "model": "demo", "key": "k1"}
GOOD = {"normal": "diverged", "sgl_det": "bitwise"}
ROOT = Path(__file__).parents[2]


def measured(name="decode_bs1", ours=1.6, cached=0, metric="seconds"):
    return [
        {"workload": name, "arm": arm, "round": n, "counted": n > 0, "cached": cached}
        | {"metrics": {metric: seconds + n / 100}}
        for n in range(4)
        for arm, seconds in (("normal", 2.0), ("sgl_det", ours))
    ]


def rows(found, verdicts=GOOD, name="decode_bs1", head=HEAD, notes=None):
    return results.rows(found, {name: WORKLOADS[name]}, head, verdicts, notes)


def test_rows_have_what_was_agreed_and_a_ratio_on_ours_alone():
    normal, ours = rows(measured())
    for row in (normal, ours):
        fields = {"backend", "workload", "arm", "metric", "value", "min", "max", "ratio", "verdict"}
        assert fields | {"key"} <= set(row)
    assert (normal["value"], normal["min"], normal["max"]) == (2.02, 2.01, 2.03)
    assert normal["ratio"] is None and normal["verdict"] == "diverged"
    assert ours["ratio"] == pytest.approx(1.62 / 2.02, abs=1e-4)
    assert ours["ratio_min"] < ours["ratio"] < ours["ratio_max"]
    assert ours["rounds"] == 3


@pytest.mark.parametrize("red", ["diverged", "not tested"])
def test_a_red_verdict_has_no_ratio(red):
    _, ours = rows(measured(), {"sgl_det": red})
    assert ours["ratio"] is None and "ratio_min" not in ours
    made = table.speed_ratio(ours)
    assert made == "-"


def test_prompts_that_were_not_in_the_cache_have_no_ratio():
    name = "decode_bs1_32k"
    _, good = rows(measured(name, cached=32_767), name=name)
    _, cold = rows(measured(name, cached=64), name=name)
    assert good["ratio"] and cold["ratio"] is None
    assert cold["note"] == "prompts not read from the cache: normal, sgl_det"
    once = {**measured(name)[2], "arm": "deterministic"}
    *_, ours, det = rows([*measured(name, cached=32_767), once], name=name)
    assert ours["ratio"] and det["note"] == "prompts not read from the cache: deterministic"


def test_an_arm_without_a_prefix_cache_is_named(tmp_path):
    name = "shared_prefix_chat"
    notes = {"normal": "the prefix cache is off in this arm"}
    normal, ours = rows(measured(name), name=name, notes=notes)
    assert normal["note"] == notes["normal"] and "note" not in ours
    results.write(tmp_path, document([normal, ours]))
    line = "* fa3 shared_prefix_chat (normal): the prefix cache is off in this arm"
    assert line in table.servers_table(tmp_path).splitlines()


def document(found, **other):
    return {"gpu": "G", "rows": found, "servers": [], **other}


def test_sittings_merge_by_key_and_the_table_shows_the_newest(tmp_path):
    first = document(rows(measured()))
    better = document(rows(measured(ours=1.0)))
    newer = document(rows(measured(ours=1.2), head=HEAD | {"key": "k2"}))
    merged = results.merged(results.merged(first, better), newer)
    ours = [r for r in merged["rows"] if r["arm"] == "sgl_det"]
    assert [(r["key"], r["value"]) for r in ours] == [("k1", 1.02), ("k2", 1.22)]
    results.write(tmp_path, merged)
    assert results.load(tmp_path) == merged
    shown = table.servers_table(tmp_path)
    assert "`k2`" in shown and "`k1`" not in shown
    assert "| fa3 | decode_bs1 | 3 | s | 2.02 | - | 1.22 | 1.656 " in shown
    found = results.rounds_under(merged["rows"], "fa3", "sgl_det", "k2", "demo")
    assert found == {"decode_bs1": 3}


def test_a_sitting_that_was_cut_short_takes_nothing_away_but_a_red_verdict_counts():
    whole, short = measured(), [m for m in measured(ours=1.0) if m["round"] < 2]
    kept = results.merged(document(rows(whole)), document(rows(short)))
    assert [r["rounds"] for r in kept["rows"]] == [3, 3]
    red = rows(short, GOOD | {"sgl_det": "diverged"})
    _, ours = results.merged(document(rows(whole)), document(red))["rows"]
    assert (ours["verdict"], ours["rounds"], ours["ratio"]) == ("diverged", 1, None)


@pytest.mark.parametrize("group, done", [(("normal", "sgl_det"), 1), (("deterministic",), 0)])
def test_a_full_suite_goes_on_where_an_arm_has_no_rows(group, done, tmp_path):
    session = Session(
        settings=arms.Settings(backend="fa3", model="demo", pool=1, logs=tmp_path),
        workloads={"decode_bs1": WORKLOADS["decode_bs1"]},
        arms=tuple(arms.ARMS),
        out=tmp_path,
        again=False,
        head={"key": "k1"},
        document=document(rows(measured())),
    )
    assert len(session._done(group)) == done


def test_results_of_two_machines_are_not_merged():
    with pytest.raises(ValueError, match="results of 'H' cannot be merged into those of 'G'"):
        results.merged(document([]), document([], gpu="H"))


def test_what_each_arm_has_alone_stands_below_the_table(tmp_path):
    values = {"normal": {"kv_tokens": 1000, "available_gb": 9.5}}
    values |= {"sgl_det": {"kv_tokens": 990, "available_gb": 9.1}}
    results.write(tmp_path, document(results.facts(results.ALONE, values, HEAD)))
    text = (
        "normal / sgl_det, each alone on the GPU: room for 1000 / 990 KV tokens (0.990), 9.5 / 9.1"
    )
    assert text in table.servers_table(tmp_path)
    assert table.servers_table(tmp_path / "none") == "Not measured yet."


def test_the_committed_results_hold_to_their_own_rules():
    for path in (ROOT / "benchmarks" / "results").glob("*/e2e.json"):
        for r in json.loads(path.read_text())["rows"]:
            assert r["arm"] in arms.ARMS and r["key"]
            if r["ratio"] is not None:
                assert r["arm"] == "sgl_det" and r["verdict"] == "bitwise"
                assert r["ratio_min"] <= r["ratio"] <= r["ratio_max"]


def _report(mismatches, verdict_="bitwise"):
    row = AxisResult(axis="batch_size", verdict=verdict_, driven=True, mismatches=mismatches)
    empty = {"server": {}, "answers": {}, "subject": {}, "total": {}}
    return Report(url="", key=None, seed=0, quick=True, seconds=0.0, rows=(row,), **empty)


def test_verdicts_of_reports():
    assert verdict.of_report(_report(0)) == "bitwise"
    assert verdict.of_report(_report(3, "diverged")) == "diverged"
    assert verdict.of_report(_report(0, "not tested")) == "not tested"


def test_unequal_pools_are_refused():
    arms.check_pools(
        {"normal": {"max_total_num_tokens": 5}, "sgl_det": {"max_total_num_tokens": 5}}
    )
    with pytest.raises(RuntimeError, match="normal 5, sgl_det 4"):
        arms.check_pools(
            {"normal": {"max_total_num_tokens": 5}, "sgl_det": {"max_total_num_tokens": 4}}
        )


@pytest.mark.parametrize("memory, count", [(100 * 2**30, 1), (15 * 2**30, 2), (None, 2)])
def test_the_deterministic_arm_runs_beside_the_others_where_it_fits(
    memory, count, monkeypatch, demo_model, tmp_path
):
    monkeypatch.setattr(arms, "gpu_memory", lambda: memory)
    settings = arms.Settings(backend="fa3", model=demo_model, pool=300_000, logs=tmp_path)
    assert len(arms.groups(tuple(arms.ARMS), settings)) == count
    named = arms.server_bytes("demo", 300_000)
    assert abs(named - arms.server_bytes(demo_model, 300_000)) < 2**20  # the file's header


def test_the_distinct_completions_and_where_they_part():
    found = Counter({(1, 2, 3): 5, (1, 2, 4): 2, (1, 9, 9): 1, (1, 2): 1})
    told = thousand.outcome(found)
    assert (told["completions"], told["distinct"], told["most_frequent"]) == (9, 4, 5)
    assert told["first_divergence"] == 1
    assert told["divergences"] == [(1, 1), (2, 3)]
    assert thousand.outcome(Counter({(1,): 3}))["first_divergence"] is None
    with pytest.raises(ValueError, match="no completion"):
        thousand.outcome(Counter())


def test_waves_are_few_and_many_and_follow_from_the_seed():
    e = thousand.Experiment()
    found = thousand.waves(e)
    assert found == thousand.waves(e) != thousand.waves(thousand.Experiment(seed=1))
    assert sum(copies for copies, _ in found) == 1000
    assert {1, 26, 52, 104} <= {copies for copies, _ in found}
    assert len(found) < 25 and max(users for _, users in found) <= e.background


def experiment_row(arm, distinct):
    places = [(3, 4)] if distinct > 1 else []
    found = {"completions": 10, "distinct": distinct, "most_frequent": 6, "divergences": places}
    found["first_divergence"] = 3 if distinct > 1 else None
    return thousand.row(HEAD, arm, thousand.Experiment(count=10, tokens=8), found)


def test_experiments_replace_their_equals(tmp_path):
    thousand.write(tmp_path, "G", [experiment_row("normal", 4), experiment_row("sgl_det", 1)])
    kept = thousand.write(tmp_path, "G", [experiment_row("normal", 5)])
    assert [(r["arm"], r["distinct"]) for r in kept] == [("sgl_det", 1), ("normal", 5)]
    with pytest.raises(ValueError, match="is of 'G', not of 'H'"):
        thousand.write(tmp_path, "H", [])


def test_the_report_is_one_page_that_loads_nothing(tmp_path):
    results.write(tmp_path, document(rows(measured())))
    thousand.write(tmp_path, "G", [experiment_row("normal", 4), experiment_row("sgl_det", 1)])
    text = report.build(tmp_path).read_text()
    assert text.count("data:image/svg+xml;base64,") == 2
    assert "4 &rarr; 1" in text and "\N{MINUS SIGN}19." in text
    assert text.count("Not measured yet on this machine") == 4
    assert "http" not in text.replace("http://www.w3.org", "")
    with pytest.raises(ValueError, match="has none of e2e.json"):
        report.build(tmp_path / "none")


def test_a_report_with_latencies_under_load(tmp_path):
    found = measured("poisson_50", metric="ttft_p50_ms")
    for m in found:
        m["metrics"]["itl_p50_ms"] = 0.5
        m["quantiles"] = {"ttft_ms": list(range(1, 15)), "itl_ms": list(range(1, 15))}
    made = rows(found, name="poisson_50")
    assert all(len(r["quantiles"]) == 14 for r in made) and len(made) == 4
    results.write(tmp_path, document(made))
    text = report.build(tmp_path).read_text()
    assert text.count("data:image/svg+xml;base64,") == 1
