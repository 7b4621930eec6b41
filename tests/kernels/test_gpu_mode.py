"""Switching the GPU's mode on and off: what is proven, installed and reported, on a CPU."""

from __future__ import annotations

import json
import logging
import re
from contextlib import nullcontext

import pytest
import torch
from linear_support import halves, kernel, on_cpu, twin

from sgl_det.kernels import canary, cublas, gpu_mode, linear, matmul, proof
from sgl_det.kernels.linear_candidates import Shape
from sgl_det.kernels.linear_setup import Unproven
from sgl_det.testing import assert_bitwise_equal

WIDE = Shape(n=16, k=32, dtype=torch.float16)
NARROW = Shape(n=8, k=32, dtype=torch.float16, bias=True)
SPEEDS = {"wrong": 1.0, "fast": 2.0, "slow": 3.0}


class Overrides:
    """Counts how many are in place."""

    on = 0

    def __init__(self):
        type(self).on += 1

    def undo(self):
        type(self).on -= 1


@pytest.fixture
def mode(monkeypatch, tmp_path):
    """A mode whose kernels are those of `linear_support`; off after the test."""
    asked = on_cpu(monkeypatch, SPEEDS, [kernel("wrong", halves), kernel("fast"), kernel("slow")])
    monkeypatch.setattr(cublas, "no_split_k", nullcontext)
    monkeypatch.setattr(matmul, "matmul", twin)
    monkeypatch.setattr(gpu_mode, "MOST_ROWS", 4)
    monkeypatch.setattr(gpu_mode, "machine", lambda: {"gpu": "none"})
    monkeypatch.setattr(gpu_mode, "Overrides", type("Counted", (Overrides,), {}))
    for name, value in (("PROVEN", {}), ("BROKEN", []), ("SETTINGS", proof.Settings())):
        monkeypatch.setattr(proof, name, value)
    proof.SETTINGS.cache = tmp_path
    yield asked
    gpu_mode.disable()


def names(plan):
    return [candidate.name for candidate in plan.chosen]


def test_layers_are_served_by_what_is_proven(mode):
    gpu_mode.enable([WIDE, NARROW, WIDE], {})
    assert linear.PLANS.keys() == {WIDE, NARROW} and mode.proofs == 2
    assert names(linear.PLANS[WIDE]) == ["fast"] * 3 and gpu_mode.Overrides.on == 1
    x, weight, bias = torch.randn(9, 32).half(), torch.randn(8, 32).half(), torch.randn(8).half()
    assert_bitwise_equal(linear.linear(x, weight, bias), twin(x, weight, bias))


def test_report_names_layers_and_rows(mode):
    gpu_mode.enable([WIDE, NARROW], {"norm": lambda: "fused", "qk": lambda: "sgl_det, because"})
    report = json.loads(json.dumps(proof.PROVEN))
    assert list(report["linear"]) == ["8x32 float16 bias", "16x32 float16"]
    assert report["linear"]["16x32 float16"]["rejected"].keys() == {"wrong"}
    assert report["rows"] == {"norm": "fused", "qk": "sgl_det, because"}
    assert report["canary"] == {"cases": 0, "mismatches": 0, "watched": 6}


def test_a_rejected_kernel_is_warned_of(mode, caplog):
    with caplog.at_level(logging.WARNING, "sgl_det"):
        gpu_mode.enable([WIDE], {})
    (record,) = caplog.records
    assert re.search(r"wrong .* 16x32 float16: .* elements differ at 1 rows", record.getMessage())


def test_settings_are_followed(mode):
    proof.SETTINGS.linear = "slow"
    gpu_mode.enable([WIDE], {})
    assert names(linear.PLANS[WIDE]) == ["slow"] * 3


def test_a_second_start_reads_the_cache(mode):
    gpu_mode.enable([WIDE], {})
    gpu_mode.enable([WIDE], {})
    assert mode.proofs == 1 and gpu_mode.Overrides.on == 1
    proof.SETTINGS.cache = None
    gpu_mode.enable([WIDE], {})
    assert mode.proofs == 2


def test_disable_leaves_nothing(mode):
    gpu_mode.enable([WIDE], {})
    gpu_mode.disable()
    gpu_mode.disable()
    assert linear.PLANS == {} and gpu_mode.Overrides.on == 0 and canary._cases is None


def test_nothing_is_installed_where_a_layer_is_unproven(mode):
    mode.known[:] = [kernel("wrong", halves)]
    with pytest.raises(Unproven, match="16x32"):
        gpu_mode.enable([WIDE], {})
    assert linear.PLANS == {} and gpu_mode.Overrides.on == 0 and canary._cases is None


def test_nothing_is_installed_where_rows_are_unproven(mode):
    def depends():
        raise RuntimeError("a row of RMSNorm depends on the others")

    with pytest.raises(RuntimeError, match="depends on the others"):
        gpu_mode.enable([WIDE], {"norm": depends})
    assert linear.PLANS == {} and gpu_mode.Overrides.on == 0 and canary._cases is None


def test_a_failure_after_a_success_leaves_nothing(mode):
    gpu_mode.enable([WIDE], {})
    mode.known[:] = [kernel("wrong", halves)]
    with pytest.raises(Unproven):
        gpu_mode.enable([NARROW], {})
    assert linear.PLANS == {} and gpu_mode.Overrides.on == 0


def test_checks_of_rows_run_once_and_without_overrides(mode):
    """The fused norms are proven as they will serve: they call no product."""
    ran = []
    gpu_mode.enable([WIDE], {"norm": lambda: ran.append(gpu_mode.Overrides.on) or "fused"})
    assert ran == [0]
