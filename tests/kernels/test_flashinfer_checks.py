"""The checks that `benchmarks/check_flashinfer.py` makes on a GPU, on a kernel emulated in numpy.

They show that the plans give the right attention in every phase, that a kernel without the edits
of `flashinfer_headers` is found out, and that no time stands beside a wrong result.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sgl_det.kernels.flashinfer_headers import EDITS
from sgl_det.kernels.flashinfer_plan import Heads, plan

from .flashinfer_emulator import Emulator

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODULES = ("build_flashinfer", "flashinfer_calls", "graph_timing", "time_flashinfer")


@pytest.fixture
def checks(monkeypatch):
    """The benchmark, on the CPU, with short sequences and one KV head."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in (*MODULES, "check_flashinfer"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    checks = importlib.import_module("check_flashinfer")
    calls = sys.modules["flashinfer_calls"]
    monkeypatch.setattr(calls, "DEVICE", "cpu")
    monkeypatch.setattr(calls, "WORKSPACE", 1 << 24)
    for name, value in {
        "DIMS": (64,),
        "GROUPS": (3,),
        "LENGTH": 200,
        "CHUNK": 128,
        "POSITIONS": (0, 63, 64, 127, 128, 199),
        "STARTS": (1, 64, 127, 190),
        "QWEN": Heads(qo=4, kv=1, dim=64),
        "CONTEXT": 256,
        "POOL": 20_000,
    }.items():
        monkeypatch.setattr(checks, name, value)
    small = lambda heads, requests, n: calls.Pool(  # noqa: E731
        Heads(qo=heads.group, kv=1, dim=64), requests, n
    )
    monkeypatch.setattr(checks, "Pool", small)
    yield checks
    for name in (*MODULES, "check_flashinfer"):
        sys.modules.pop(name, None)


def run(part) -> list[dict]:
    lines: list[dict] = []
    part(lines.append)
    return lines


def test_every_phase_has_the_same_bits(checks, monkeypatch):
    monkeypatch.setattr(checks, "fa2_module", lambda dim, edits: Emulator())
    (line,) = run(checks.bits)
    assert line["error"] < 0.02
    assert len(line["differing"]) == 17
    assert all(bad == 0 < rows for bad, rows in line["differing"].values()), line


def test_replayed_batch_has_the_bits_of_eager(checks, monkeypatch):
    made = []

    def captured():
        return SimpleNamespace(replay=lambda: made[-1]())

    @contextlib.contextmanager
    def recording(graph):
        before = checks.Call.__call__
        with monkeypatch.context() as patch:
            patch.setattr(checks.Call, "__call__", lambda self: made.append(lambda: before(self)))
            yield

    monkeypatch.setattr(checks.torch.cuda, "CUDAGraph", captured)
    monkeypatch.setattr(checks.torch.cuda, "graph", recording)
    monkeypatch.setattr(checks, "fa2_module", lambda dim, edits: Emulator())
    (line,) = run(checks.graph)
    assert line["differing"] == [[0, 0]] * 6


@pytest.mark.long
def test_kernel_without_the_edits_is_found_out(checks, monkeypatch):
    """Each edit by what the control shows of it; whether the hardware shows it, a GPU must say."""

    def stock(tile):
        return {16: 128, 64: 32, 128: 16}[tile]

    def module(dim, edits):
        return Emulator() if edits == EDITS else Emulator(exact=bool(edits), kv_tile=stock)

    monkeypatch.setattr(checks, "fa2_module", module)
    for line in run(checks.control):
        bad, rows = line["differing"]
        assert 0 < rows and (bad > 0) == (line["expected"] == "differs"), line


@pytest.fixture
def timing(checks, monkeypatch):
    """The timed parts on short sequences; graphs hold their calls weakly, as on a GPU."""
    timing, graphs = sys.modules["time_flashinfer"], sys.modules["graph_timing"]
    small = {"BEYOND_L2": 120_000, "DECODE": ((1, 200), (3, 130)), "PREFILL": ((1, 140),)}
    heads = {"QWEN": Heads(qo=4, kv=1, dim=64), "CONTEXT": 256, "POOL": 2000}
    for name, value in {**small, **heads, "SPLIT": 128}.items():
        monkeypatch.setattr(timing, name, value)

    def heuristic(module, captured, qo, kv):
        made = plan(qo, kv, timing.QWEN, tile=16, chunk=64)
        return made.vector, sys.modules["flashinfer_calls"].on_gpu(made.image)

    def captured(calls):
        calls[-1]()
        return SimpleNamespace(calls=[weakref.ref(call) for call in calls], replayed=False)

    def replay_us(graph, repeats):
        alive = [call() for call in graph.calls]
        assert None not in alive
        for call in alive if not graph.replayed else ():
            call()
        graph.replayed = True
        return graphs.LEAST_US

    def automatic(*_):
        raise RuntimeError("the FA3 module is not compiled")

    monkeypatch.setattr(timing, "heuristic", heuristic)
    monkeypatch.setattr(timing, "automatic", automatic)
    monkeypatch.setattr(timing, "fa2_module", lambda dim, edits: Emulator())
    monkeypatch.setattr(graphs, "captured", captured)
    monkeypatch.setattr(graphs, "replay_us", replay_us)
    return timing


def test_timed_graphs_outlive_no_operand_and_have_the_right_bits(timing):
    lines = run(timing.decode) + run(timing.prefill)
    assert [len(line["arms"]) for line in lines] == [6, 6, 6]
    for line in lines:
        (_, first), *others = line["arms"].values()
        assert first is None and all(bad == 0 for _, bad in others), line
        assert set(line["errors"]) <= {"auto"}


def test_wrong_bits_are_counted_beside_the_time(timing, monkeypatch):
    class Wrong(Emulator):
        """In the last bit of one element, with the smallest query tile."""

        def paged_run(self, *args):
            super().paged_run(*args)
            args[10].view(torch.int16)[0, 0, 0] ^= int(args[2][3] == 16)

    monkeypatch.setattr(timing, "fa2_module", lambda dim, edits: Wrong())
    line = run(timing.decode)[0]  # two batches of one request
    for name, (_, bad) in line["arms"].items():
        assert bad == (None if name == "flashinfer" else 2 * name.startswith("tile 16")), line


def test_replay_that_writes_nothing_is_wrong(timing, monkeypatch):
    monkeypatch.setattr(sys.modules["graph_timing"], "replay_us", lambda graph, repeats: 1.0)
    line = run(timing.decode)[0]
    counts = [bad for _, bad in line["arms"].values() if bad is not None]
    assert len(counts) == 6 and set(counts) == {2}  # requests


def test_baseline_that_computes_something_else_is_not_timed(timing, monkeypatch):
    class Zero(Emulator):
        def paged_run(self, *args):
            super().paged_run(*args)
            args[10].zero_()

    monkeypatch.setattr(timing, "fa2_module", lambda dim, edits: Emulator() if edits else Zero())
    for line in run(timing.decode):
        assert "flashinfer" not in line["arms"] and "error of" in line["errors"]["flashinfer"]


def test_failing_replay_names_its_arm(timing, monkeypatch):
    graphs, asked = sys.modules["graph_timing"], []

    def fails(graph, repeats):
        asked.append(graph)
        if len(asked) > 2 * 7:  # each arm is measured twice before they take turns
            raise RuntimeError("an illegal memory access")
        return 1.0

    monkeypatch.setattr(graphs, "replay_us", fails)
    with pytest.raises(RuntimeError, match="flashinfer: an illegal memory access"):
        timing.decode(print)


@pytest.mark.parametrize("lost", [True, False])
def test_parts_end_where_the_gpu_is_lost(checks, monkeypatch, tmp_path, lost):
    def fails(*_):
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(checks, "PARTS", {"bits": fails, "graph": lambda emit: None})
    monkeypatch.setattr(checks.signal, "signal", lambda *_: None)
    monkeypatch.setattr(checks.signal, "setitimer", lambda *_: None)
    monkeypatch.setattr(checks.torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(checks.torch.cuda, "synchronize", fails if lost else lambda: None)
    arguments = ["check", "--out", str(tmp_path / "out"), "--parts=bits,graph"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert checks.main() == int(lost)
    lines = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [line["part"] for line in lines] == ["begin", "bits", "end" if lost else "graph"]
    assert lines[1]["error"] == "RuntimeError: CUDA error"
    assert lines[2].get("not_run") == (["graph"] if lost else None)
