"""The threads of our CUDA kernels in many orders, in the emulator: no bit follows who is first."""

from __future__ import annotations

import pytest

from sgl_det.kernels import fa3_chain, gpu_sampler
from sgl_det.testing import assert_bitwise_equal

from . import cuda_emulator
from .interpreter import ACTIVE
from .test_fa3_decode import SHAPES, Case
from .test_gpu_sampler import draw, mixed

pytestmark = [
    cuda_emulator.needs_compiler,
    pytest.mark.skipif(not ACTIVE, reason="run by test_interpreted.py"),
]


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(gpu_sampler, "run", cuda_emulator.run_sampler)
    monkeypatch.setattr(fa3_chain, "attend", cuda_emulator.attend)


def sampled(listed):
    """Rows with many logits, equal ones too, in the bin that the kept set ends in."""
    logits, given, *numbers = mixed(1203, seed=4)
    some = logits[3:11] / 10, [x[3:11] for x in given], *(x[3:11] for x in numbers)
    return draw(*some, gpu_sampler.Launch(128, 128, listed, 3))


def decoded():
    """Chunks of more tiles than a ring of four stages has places."""
    return Case(SHAPES[0], [1280, 700]).decode(launch=fa3_chain.Launch(16, 4), chunk=1280)


RUNS = {
    "sampler, listed": lambda: sampled(512),
    "sampler, counted": lambda: sampled(2),
    "FA3's chain": decoded,
}
# A place that is used again too early, and products of weights that are not there yet.
BARRIERS = {
    "sampler, listed": ("sync_block();\n    if (lane == 0) s.best", "if (lane == 0) s.best"),
    "FA3's chain": ("if (more) wait_for(&s.weighed[tile - 1], 0);", ""),
}


def assert_same_in_orders(run, want, orders, monkeypatch):
    for order in orders:
        monkeypatch.setattr(cuda_emulator, "order", order)
        assert_bitwise_equal(run(), want, f"order {order}")


@pytest.mark.parametrize("name", RUNS)
def test_no_bit_follows_the_order_of_threads(name, monkeypatch):
    assert_same_in_orders(RUNS[name], RUNS[name](), (7, 77, 777), monkeypatch)


@pytest.mark.parametrize("name", BARRIERS)
def test_control_a_missing_barrier_shows_in_some_order(name, monkeypatch):
    want = RUNS[name]()
    monkeypatch.setattr(cuda_emulator, "changed", BARRIERS[name])
    orders = [7919 * i for i in range(1, 30)]
    with pytest.raises(AssertionError, match="differ"):
        assert_same_in_orders(RUNS[name], want, orders, monkeypatch)
