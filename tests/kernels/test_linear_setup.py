"""From layers to plans: the fastest kernels of those proven, and what is read from the cache."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest
import torch
from linear_support import SHAPE, halves, kernel, on_cpu, twin, wrong_where

from sgl_det.kernels import cublas, linear_proof, linear_setup
from sgl_det.kernels.linear_candidates import Shape
from sgl_det.kernels.linear_setup import Unproven, set_up
from sgl_det.kernels.proof_cache import ProofCache

SPEEDS = {"wrong": 1.0, "few": 2.0, "fast": 3.0, "slow": 4.0}
FAST, SLOW = kernel("fast"), kernel("slow")
MACHINE = {"gpu": "none", "sources": "0123"}


@pytest.fixture
def split_k(monkeypatch):
    """Whether split-K was forbidden: one entry for each entry into the block, True after it."""
    blocks = []

    @contextmanager
    def no_split_k():
        blocks.append(False)
        try:
            yield
        finally:
            blocks[-1] = True

    monkeypatch.setattr(cublas, "no_split_k", no_split_k)
    return blocks


def names(layer):
    return [candidate.name for candidate in layer.plan.chosen]


@pytest.fixture
def layer_of(monkeypatch, split_k):
    """Set one layer up with these kernels: a function of them."""

    def layer(*known, most_rows=8, cache=None, only="", shape=SHAPE, short=4):
        asked = on_cpu(monkeypatch, SPEEDS, known, short)
        found = set_up([shape], cache=cache, most_rows=most_rows, only=only)
        assert asked.deep_gemm == [only.startswith("deep")] and all(split_k)
        return found[shape]

    return layer


def test_the_fastest_proven_kernel_serves(layer_of):
    layer = layer_of(SLOW, kernel("wrong", halves), FAST)
    assert layer.plan.edges == (1, 2, 4, 8) and names(layer) == ["fast"] * 4


def test_a_rejected_kernel_serves_nowhere_and_is_reported(layer_of):
    layer = layer_of(kernel("wrong", halves), SLOW)
    assert names(layer) == ["slow"] * 4 and layer.report["proven"].keys() == {"slow"}
    assert "elements differ at 1 rows" in layer.report["rejected"]["wrong"]


def test_a_kernel_that_is_wrong_in_one_bucket_serves_the_others(layer_of):
    layer = layer_of(kernel("wrong", wrong_where(lambda rows, at: rows == 3)), SLOW)
    assert names(layer) == ["wrong", "wrong", "slow", "wrong"]
    assert layer.report["proven"]["wrong"] == [1, 2, 8]


@pytest.mark.parametrize("rows, bucket", [((2, 3), 1), ((4, 8), 3)], ids=["3 alone", "4 alone"])
def test_a_kernel_serves_only_buckets_for_which_it_is_offered_whole(layer_of, rows, bucket):
    """Of 3 and 4 rows, which are one bucket, `few` takes one number alone."""
    found = names(layer_of(kernel("few", rows=rows), FAST))
    assert [i for i, name in enumerate(found) if name == "few"] == [bucket]


def test_every_bucket_is_chosen_for_itself(layer_of):
    layer = layer_of(kernel("few", rows=(1, 2)), kernel("slow", rows=(3, 8)))
    assert names(layer) == ["few", "few", "slow", "slow"]
    x, weight = torch.randn(30, 64).half(), torch.randn(16, 64).half()
    assert layer.plan(x, weight, None).shape == (30, 16)


def test_only_forces_a_kernel_where_it_is_proven(layer_of):
    bad = wrong_where(lambda rows, at: rows == 8)
    layer = layer_of(FAST, kernel("slow", bad), only="slow")
    assert names(layer) == ["slow", "slow", "slow", "fast"]
    assert names(layer_of(FAST, kernel("wrong", halves), only="wrong")) == ["fast"] * 4
    assert names(layer_of(FAST, SLOW, only="deep_gemm")) == ["fast"] * 4


def test_a_layer_that_nobody_computes_right_is_refused(layer_of, split_k):
    with pytest.raises(Unproven) as error:
        layer_of(kernel("wrong", halves), kernel("few", rows=(100, 200)))
    text = str(error.value)
    assert "the linear layer 16x64 (torch.float16) at 1 rows" in text
    assert "wrong: " in text and "elements differ" in text
    assert split_k == [True]


def test_only_fast_kernels_are_proven(layer_of):
    report = layer_of(SLOW, FAST, short=1).report
    assert report["proven"] == {"fast": [1, 2, 4, 8]} and not report["rejected"]


def test_slow_kernels_are_proven_where_no_fast_one_is(layer_of):
    """`wrong` is the fastest of all; at 8 rows alone it is not proven, and `slow` serves."""
    bad = wrong_where(lambda rows, at: rows == 8)
    layer = layer_of(SLOW, kernel("wrong", bad), short=1)
    assert names(layer) == ["wrong"] * 3 + ["slow"]
    assert layer.report["proven"] == {"wrong": [1, 2, 4], "slow": [8]}
    assert list(layer.report["rejected"]) == ["wrong"]


def test_a_bucket_that_nobody_computes_right_is_refused(layer_of):
    bad = wrong_where(lambda rows, at: rows == 5)
    with pytest.raises(Unproven, match="at 8 rows.*slow: .* differ at 5 rows"):
        layer_of(kernel("slow", bad))


def test_report_is_plain_and_complete(layer_of):
    report = layer_of(SLOW, kernel("wrong", halves)).report
    assert json.loads(json.dumps(report)) == report
    assert report["buckets"][-1] == {"rows": 8, "kernel": "slow", "us": 4.0}
    assert report["cases"] > 20 and report["seconds"] >= 0


def test_layers_are_set_up_in_turn_with_their_progress(monkeypatch, split_k):
    on_cpu(monkeypatch, SPEEDS, [SLOW])
    shapes, told = [SHAPE, Shape(n=8, k=32, dtype=torch.bfloat16, bias=True)], []
    found = set_up(shapes, cache=None, most_rows=2, progress=told.append)
    assert list(found) == shapes and told == ["linear 16x64", "linear 8x32"]
    assert all(layer.plan.edges == (1, 2) for layer in found.values())


@pytest.fixture
def cached(monkeypatch, split_k, tmp_path):
    """Set up with a cache; returns a function of the kernels and what was asked."""

    def layer(*known, only="", most_rows=8, machine=MACHINE):
        asked = on_cpu(monkeypatch, SPEEDS, known)
        cache = ProofCache(tmp_path, machine)
        found = set_up([SHAPE], cache=cache, most_rows=most_rows, only=only)
        return found[SHAPE], asked.proofs

    return layer


def test_what_was_proven_is_not_proven_again(cached):
    first, proofs = cached(SLOW, FAST)
    second, again = cached(SLOW, FAST)
    assert (proofs, again) == (1, 0)
    assert second.report == first.report and names(second) == names(first) == ["fast"] * 4


def test_a_kept_kernel_that_is_gone_is_replaced(cached):
    """As an algorithm that cuBLASLt no longer proposes."""
    cached(SLOW, FAST)
    layer, proofs = cached(SLOW)
    assert (names(layer), proofs) == (["slow"] * 4, 1)
    assert cached(SLOW)[1] == 0


@pytest.mark.parametrize(
    "other",
    [{"only": "slow"}, {"most_rows": 4}, {"machine": MACHINE | {"gpu": "another"}}],
    ids=["forced", "fewer rows", "another machine"],
)
def test_another_question_is_answered_anew(cached, other):
    cached(SLOW, FAST)
    _, proofs = cached(SLOW, FAST, **other)
    assert proofs == 1


@pytest.mark.parametrize("text", ["", "{", "null", '{"body": {}, "digest": ""}'], ids=repr)
def test_a_spoilt_file_is_written_anew(cached, tmp_path, text):
    first, _ = cached(SLOW)
    (file,) = tmp_path.iterdir()
    good = json.loads(file.read_text())
    file.write_text(text)
    second, proofs = cached(SLOW)
    assert proofs == 1 and names(second) == names(first)
    assert json.loads(file.read_text()).keys() == good.keys()
    assert cached(SLOW)[1] == 0


def test_a_kept_proof_that_no_longer_holds_is_refused(cached):
    cached(SLOW)
    with pytest.raises(Unproven, match="slow was proven .* 16x64 and now differs .*differ at 8"):
        cached(kernel("slow", halves))


def test_a_kept_proof_is_not_believed_for_a_kernel_that_raises(cached):
    def gone(x, weight, bias):
        raise RuntimeError("no such kernel")

    cached(SLOW)
    with pytest.raises(Unproven, match="now differs .*no such kernel"):
        cached(kernel("slow", gone))


def test_what_does_not_serve_is_not_tried_again(cached):
    cached(SLOW, FAST)
    layer, proofs = cached(kernel("slow", halves), FAST)
    assert proofs == 0 and names(layer) == ["fast"] * 4


def test_one_case_is_repeated_for_each_kernel_that_serves(cached, monkeypatch):
    known = kernel("few", rows=(1, 2)), kernel("slow", rows=(3, 8))
    cached(*known)
    tried = []
    monkeypatch.setattr(linear_proof, "operands", spy(tried, linear_proof.operands))
    cached(*known)
    assert tried == [2, 8]


def spy(rows, original):
    def operands(kind, shape, m, *args, **kwargs):
        rows.append(m)
        return original(kind, shape, m, *args, **kwargs)

    return operands


def test_least_rows_of_a_bucket():
    least = [linear_setup._least(edge) for edge in linear_proof.EDGES]
    assert least[:5] == [1, 2, 3, 5, 9] and least[-1] == 4097


def test_control_the_kernels_of_these_tests_differ():
    data = linear_proof.operands("cancelling", SHAPE, 8, "cpu")
    assert (twin(*data) != halves(*data)).any(1).all()
