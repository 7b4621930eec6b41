"""The checks that `benchmarks/check_flashinfer.py` makes on a GPU, on a kernel emulated in numpy.

They show that the plans give the right attention in every phase, and that a kernel without the
edits of `flashinfer_headers` is found out.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sgl_det.kernels.flashinfer_headers import EDITS
from sgl_det.kernels.flashinfer_plan import Heads

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
