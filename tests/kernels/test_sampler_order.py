"""The GPU sampler's threads in many orders, in the emulator: no bit follows who comes first."""

from __future__ import annotations

import pytest

from sgl_det.kernels import gpu_sampler
from sgl_det.kernels.gpu_sampler import Launch
from sgl_det.testing import assert_bitwise_equal

from . import cuda_emulator
from .interpreter import ACTIVE
from .test_gpu_sampler import draw, mixed

pytestmark = [
    cuda_emulator.needs_compiler,
    pytest.mark.skipif(not ACTIVE, reason="run by test_interpreted.py"),
]


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(gpu_sampler, "run", cuda_emulator.run_sampler)


WARPS = [
    Launch(128, 128, 512, 3),
    Launch(128, 128, 2, 3),
]  # lists that most bins fit into, or none


def dense():
    """Rows with many logits, equal ones too, in the bin that the kept set ends in."""
    logits, given, *numbers = mixed(1203, seed=4)
    return logits[3:11] / 10, [x[3:11] for x in given], *(x[3:11] for x in numbers)


@pytest.mark.parametrize("warps", WARPS, ids=["listed", "counted"])
def test_no_bit_follows_the_order_of_threads(warps, monkeypatch):
    logits, given, *numbers = dense()
    want = draw(logits, given, *numbers, warps)
    for order in (7, 77, 777):
        monkeypatch.setattr(cuda_emulator, "order", order)
        assert_bitwise_equal(draw(logits, given, *numbers, warps), want, f"order {order}")


def test_control_a_missing_barrier_shows_in_some_order(monkeypatch):
    without = ("    sync_block();\n    if (lane == 0) s.best", "    if (lane == 0) s.best")
    monkeypatch.setattr(cuda_emulator, "changed", without)
    logits, given, *numbers = dense()
    want = draw(logits, given, *numbers, WARPS[0])

    def shows(order):
        monkeypatch.setattr(cuda_emulator, "order", 7919 * order)
        return bool((draw(logits, given, *numbers, WARPS[0]) != want).any())

    assert any(map(shows, range(1, 30)))
