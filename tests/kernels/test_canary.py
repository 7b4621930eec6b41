"""The case that an idle server repeats: when it runs, and what a difference ends."""

from __future__ import annotations

import logging

import pytest
import torch
from linear_support import SHAPE, halves, kernel, twin

from sgl_det.kernels import canary, linear_proof, proof
from sgl_det.kernels.linear import Plan
from sgl_det.kernels.linear_candidates import Shape
from sgl_det.kernels.linear_setup import Layer

RIGHT, WRONG = kernel("right"), kernel("wrong", halves)


class Clock:
    """Seconds that pass only when told."""

    def __init__(self):
        self.now = 1000.0

    def pass_time(self, seconds=proof.SETTINGS.canary_s):
        self.now += seconds
        canary.tick()


@pytest.fixture
def clock(monkeypatch):
    """A clock at which the canary looks; what it found is forgotten after the test."""
    clock, one_case = Clock(), linear_proof.one_case
    monkeypatch.setattr(canary.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(proof, "BROKEN", [])
    monkeypatch.setattr(proof, "PROVEN", {})
    monkeypatch.setattr(linear_proof, "canonical", twin)

    def on_cpu(shape, candidate, rows):
        clock.cases.append((shape, candidate.name, rows))
        return one_case(shape, candidate, rows, device="cpu")

    clock.cases = []
    monkeypatch.setattr(linear_proof, "one_case", on_cpu)
    yield clock
    canary.stop()


def layer(*kernels, edges=(1, 4)):
    return Layer(plan=Plan(edges, kernels), report={})


def test_nothing_runs_before_it_is_time(clock):
    canary.start({SHAPE: layer(RIGHT, RIGHT)})
    canary.tick()
    clock.pass_time(proof.SETTINGS.canary_s - 1)
    assert clock.cases == []
    assert proof.PROVEN["canary"] == {"cases": 0, "mismatches": 0, "watched": 2}
    clock.pass_time(1)
    canary.tick()
    assert clock.cases == [(SHAPE, "right", 1)] and proof.PROVEN["canary"]["cases"] == 1


def test_every_kernel_of_every_layer_has_its_turn(clock):
    other = Shape(n=8, k=32, dtype=torch.bfloat16, bias=True)
    canary.start({SHAPE: layer(kernel("a"), kernel("b")), other: layer(kernel("c"), edges=(2,))})
    for _ in range(5):
        clock.pass_time()
    turn = [(SHAPE, "a", 1), (SHAPE, "b", 4), (other, "c", 2)]
    assert clock.cases == turn + turn[:2] and not proof.BROKEN
    assert proof.PROVEN["canary"] == {"cases": 5, "mismatches": 0, "watched": 3}


def test_a_kernel_that_is_no_longer_right_ends_every_claim(clock, caplog):
    canary.start({SHAPE: layer(RIGHT, WRONG)})
    clock.pass_time()
    assert proof.BROKEN == []
    with caplog.at_level(logging.CRITICAL, "sgl_det"):
        clock.pass_time()
    (sentence,) = proof.BROKEN
    assert "wrong was proven for the linear layer 16x64 at start-up and no longer" in sentence
    assert "elements differ at 4 rows" in sentence and sentence in caplog.text
    assert proof.PROVEN["canary"] == {"cases": 2, "mismatches": 1, "watched": 2}
    # It goes on: what was broken stays broken.
    clock.pass_time()
    assert len(proof.BROKEN) == 1 and proof.PROVEN["canary"]["cases"] == 3


@pytest.mark.parametrize("part", ["operands", "canonical", "kernel"])
def test_no_memory_proves_nothing_either_way(clock, caplog, monkeypatch, part):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory\nof all it has")

    if part != "kernel":
        monkeypatch.setattr(linear_proof, part, full)
    canary.start({SHAPE: layer(kernel("full", full if part == "kernel" else twin), edges=(1,))})
    with caplog.at_level(logging.WARNING, "sgl_det"):
        clock.pass_time()
    assert "the canary did not run: CUDA out of memory" in caplog.text and not proof.BROKEN
    assert proof.PROVEN["canary"] == {"cases": 0, "mismatches": 0, "watched": 1}
    clock.pass_time(1)
    assert len(clock.cases) == 1, "it waits for the next time"


def test_a_kernel_that_raises_is_broken(clock):
    def gone(x, weight, bias):
        raise ValueError("no such kernel")

    canary.start({SHAPE: layer(kernel("gone", gone), edges=(1,))})
    clock.pass_time()
    assert "no such kernel" in proof.BROKEN[0]


def test_large_cases_are_left_out(clock):
    """Their operands would not fit beside a full KV pool."""
    wide = Shape(n=1 << 20, k=4096, dtype=torch.bfloat16)
    canary.start(
        {SHAPE: layer(RIGHT, RIGHT, RIGHT, edges=(1, 64, 96)), wide: layer(RIGHT, edges=(1,))}
    )
    for _ in range(3):
        clock.pass_time()
    assert {(shape, rows) for shape, _, rows in clock.cases} == {(SHAPE, 1), (SHAPE, 64)}


@pytest.mark.parametrize("layers", [{}, {Shape(n=1 << 20, k=4096, dtype=torch.bfloat16)}], ids=len)
def test_nothing_to_watch(clock, layers):
    canary.start({shape: layer(RIGHT, edges=(1,)) for shape in layers})
    clock.pass_time()
    assert clock.cases == [] and proof.PROVEN["canary"]["watched"] == 0


def test_stop_forgets(clock):
    canary.start({SHAPE: layer(RIGHT, RIGHT)})
    canary.stop()
    canary.stop()
    clock.pass_time()
    assert clock.cases == [] and "canary" not in proof.PROVEN


def test_start_again_watches_the_new_layers(clock):
    canary.start({SHAPE: layer(kernel("old"), edges=(1,))})
    canary.start({SHAPE: layer(kernel("new"), edges=(2,))})
    clock.pass_time()
    assert clock.cases == [(SHAPE, "new", 2)]
