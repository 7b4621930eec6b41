"""The report: verdicts, JSON and the printed lines."""

from __future__ import annotations

import json

import pytest
from audit_support import PROOFS, lines

from sgl_det.audit.kernels_seen import kernels
from sgl_det.audit.report import judge

SPLIT_K = "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_splitK_TNT"
ANSWER = {
    "key": "0123456789ab",
    "backend": "fa3",
    "kernels": PROOFS,
    "numerics": {"gpu": "NVIDIA H200", "torch": "2.11.0"},
}


@pytest.fixture
def report(events, rules):
    def make(names, answer=ANSWER):
        return judge(kernels(events(names)), rules, answer, {"model": "demo"})

    return make


def known() -> list[str]:
    return [name for _, name in lines("known.tsv")]


def test_known_kernels_pass(report):
    found = report(known())
    assert found.passed and found.problems == [] and found.unknown == ()
    assert found.text().splitlines()[-1].startswith("PASSED: ")


@pytest.mark.parametrize("planted", [n for _, n in lines("unknown.tsv")], ids=lambda n: n[:60])
def test_one_planted_kernel_fails(report, planted):
    found = report([*known(), planted])
    assert not found.passed and len(found.unknown) == 1
    assert found.rows[0] == found.unknown[0]
    assert found.text().splitlines()[-1].startswith("FAILED (1 kernel is not known")


def test_no_kernel_fails(rules):
    found = judge((), rules, ANSWER, {})
    assert not found.passed and "no GPU kernel" in found.problems[0]
    assert "FAILED" in found.text()


def test_nothing_captured_fails(events, rules):
    eager = [e for e in events(["_matmul_kernel"]) if e["name"] != "cudaGraphLaunch"]
    found = judge(kernels(eager), rules, ANSWER, {})
    assert not found.unknown and "CUDA graph" in found.problems[0]


def test_without_proofs(report):
    found = report(["nvjet_sm90_tst_192x8_64x8_2x1_v_bz_TNT"], ANSWER | {"kernels": {}})
    assert not found.passed and "'linear'" in found.unknown[0][1].why


def test_json(report):
    found = json.loads(json.dumps(report([*known(), SPLIT_K]).to_json()))
    assert list(found) == ["schema", "passed", "problems", "about", "kernels"]
    assert (found["schema"], found["passed"]) == (1, False)
    assert found["about"]["key"] == "0123456789ab" and found["about"]["gpu"] == "NVIDIA H200"
    assert found["about"]["numerics"]["torch"] == "2.11.0"
    classes = {"pointwise", "proven invariant", "fixed order", "unknown"}
    for kernel in found["kernels"]:
        assert set(kernel) == {
            *("name", "class", "rule", "why", "source"),
            *("calls", "captured", "total_us"),
        }
        assert kernel["class"] in classes and kernel["why"]
        assert (kernel["rule"] is None) == (kernel["class"] == "unknown")
        assert 0 <= kernel["captured"] <= kernel["calls"]
    assert {k["class"] for k in found["kernels"]} == classes


def test_text(report):
    text = report(["_matmul_kernel", SPLIT_K, "other_kernel"]).text()
    assert "key 0123456789ab · backend fa3 · gpu NVIDIA H200 · model demo" in text
    assert "in graphs" in text and "sgl_det_triton.product: one fp32 accumulator" in text
    line = "{ id = '', class = '', why = '', source = '', names = ['other_kernel'] },"
    assert f"\n    {line}\n" in text and "added.toml" in text
    assert "a split-K kernel" in text
    assert all(len(x) < 160 for x in report(known()).text().splitlines()[:40])
