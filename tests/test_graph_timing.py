"""Timing by CUDA graphs: what a graph reads outlives it, and a failure names its arm."""

from __future__ import annotations

import importlib
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture
def timing(monkeypatch):
    """The module, with graphs that hold their calls weakly, as on a GPU."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    monkeypatch.delitem(sys.modules, "graph_timing", raising=False)
    module = importlib.import_module("graph_timing")

    def captured(calls):
        return SimpleNamespace(calls=[weakref.ref(call) for call in calls])

    def replay_us(graph, repeats):
        for call in graph.calls:
            assert call() is not None
            call()()
        return 1.0

    monkeypatch.setattr(module, "captured", captured)
    monkeypatch.setattr(module, "replay_us", replay_us)
    return module


class Call:
    def __init__(self, after: int = 1 << 30):
        self.left = after

    def __call__(self):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("an illegal memory access")


def test_a_graph_outlives_no_operand(timing):
    make = {name: lambda name=name: timing.Arm(name, [Call(), Call()], lambda: 0) for name in "ab"}
    assert timing.in_turn(make)["arms"] == {"a": [0.5, 0], "b": [0.5, 0]}


def test_a_failing_arm_leaves_the_others_and_is_named(timing):
    make = {name: lambda name=name: timing.Arm(name, [Call()], lambda: 0) for name in "ab"}
    make["c"] = lambda: timing.Arm("c", [Call(after=1)], lambda: 0)
    found = timing.in_turn(make)
    assert set(found["arms"]) == {"a", "b"} and "illegal" in found["errors"]["c"]
    make["c"] = lambda: timing.Arm("c", [Call(after=3)], lambda: 0)
    with pytest.raises(RuntimeError, match="c: an illegal memory access"):
        timing.in_turn(make)
