"""What FlashInfer gets from its plan call, on CPU tensors: tiles, splits, buffers and refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sgl_det.kernels import flashinfer_module as module
from sgl_det.kernels.flashinfer_plan import ONE_PASS, DoesNotFit, Heads, WorkspaceTooSmall, plan
from sgl_det.testing import assert_bitwise_equal

HEADS = Heads(qo=32, kv=8, dim=128)
ORDER = module.Order(chunk=1024, context=8192, pool=20_000)


@pytest.fixture(autouse=True)
def order(monkeypatch):
    monkeypatch.setattr(module, "SETTINGS", module.Settings(order=ORDER))


class Wrapper:
    """The buffers of one of FlashInfer's wrappers."""

    def __init__(self, ints: int = 1 << 20, floats: int = 1 << 28):
        self.floats = torch.empty(floats, dtype=torch.uint8, device="meta")
        self.ints, self.pinned = (torch.full((ints,), 0x5A, dtype=torch.uint8) for _ in range(2))

    def plan(self, qo_len, kv_len, heads=HEADS, *, rows=None, graph=False, window=-1, page=1):
        lengths = [torch.tensor(x, dtype=torch.int32) for x in (qo_len, kv_len)]
        qo, kv = (torch.cat([torch.zeros(1), x.cumsum(0)]).int() for x in lengths)
        sizes = (rows or int(qo[-1]), len(qo_len), heads.qo, heads.kv, page, graph)
        rest = (heads.dim, heads.dim, True, window, 4096, False, 0)
        tensors = (self.floats, self.ints, self.pinned, qo, kv, lengths[1])
        return module.module_plan(*tensors, *sizes, *rest)


def indptr(lengths):
    return np.concatenate([[0], np.cumsum(lengths)])


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("window", [-1, 512])
def test_image_reaches_the_integer_workspace(graph, window):
    wrapper, kv = Wrapper(), [5000, 1, 1024]
    vector = wrapper.plan([1, 1, 1], kv, graph=graph, window=window)
    chunk = 1024 if window < 0 else ONE_PASS
    assert vector[3] == 16 and (vector[13], vector[14]) == (graph, graph or window < 0)
    expected = plan(indptr([1] * 3), indptr(kv), HEADS, tile=16, chunk=chunk)
    for at, arrays in ((vector[4:7], expected.vector[4:7]), ([vector[8]], [expected.vector[8]])):
        for a, b in zip(at, arrays, strict=True):
            size = 4 * expected.vector[0]
            image = torch.from_numpy(expected.image[b : b + size].copy())
            assert_bitwise_equal(wrapper.ints[a : a + size], image)
    if graph:
        assert vector == wrapper.plan([1, 1, 1], [1, 1, 1], graph=True, window=window)


@pytest.mark.parametrize(
    "rows, batch, dim, tile",
    [(4, 1, 128, 16), (5, 1, 128, 128), (5, 1, 256, 64), (64, 64, 128, 16), (65, 16, 64, 128)],
)
def test_query_tile_follows_the_work_alone(rows, batch, dim, tile):
    assert ORDER.tile(rows, batch, Heads(qo=32, kv=8, dim=dim)) == tile


def test_stage_without_the_second_edit_has_one_tile(monkeypatch):
    order = module.Order(chunk=1024, context=8192, pool=1, short=64, long=64)
    monkeypatch.setattr(module, "SETTINGS", module.Settings(order=order))
    assert {Wrapper().plan([n], [n])[3] for n in (1, 4, 5, 16, 100)} == {64}


def test_parts_of_the_pinned_buffer_are_taken_in_turn():
    wrapper = Wrapper(ints=3 * 1600)
    for step in range(4):
        vector = wrapper.plan([1], [step + 1])
        part = wrapper.pinned[(step % 3) * 1600 :]
        assert_bitwise_equal(part[: vector[9] + 4], wrapper.ints[: vector[9] + 4])
    wrapper.plan([1] * 100, [1] * 100)  # 100 items: 1608 bytes, more than a part
    assert_bitwise_equal(wrapper.pinned[:1608], wrapper.ints[:1608])
    with pytest.raises(WorkspaceTooSmall, match="a plan of 4.* bytes, expected at most 4800"):
        wrapper.plan([1] * 310, [1] * 310)


def test_step_that_fits_is_planned_in_every_captured_size():
    """And one that does not is known before: FlashInfer's own exception would end the server."""
    random, seen = np.random.default_rng(0), set()
    for batch in [1, 2, 7, 16, 40] * 6:
        kv = random.integers(1, int(random.choice([100, 3000, 8192])) + 1, batch).tolist()
        seen.add(module.fits(kv))
        for captured in (batch, batch + 1, batch + 24):
            lengths, ones = [*kv, *[1] * (captured - batch)], [1] * captured
            if module.fits(kv):
                assert Wrapper().plan(ones, lengths, graph=True)[13]
            elif captured == batch:
                with pytest.raises(DoesNotFit):
                    Wrapper().plan(ones, lengths, graph=True)
    assert seen == {True, False}


def test_captured_prefill_is_planned_for_its_rows():
    wrapper = Wrapper(floats=1 << 30)
    one = wrapper.plan([5, 0, 3, 0], [5, 0, 1003, 0], rows=64, graph=True)
    other = wrapper.plan([1, 1, 1, 61], [8192, 1, 1, 61], rows=64, graph=True)
    assert one == other and one[1] == 64
    # As many tokens as requests, though not one each.
    assert wrapper.plan([4, 0, 0, 0], [4, 0, 0, 0], rows=4, graph=True)[1] == 4


def test_what_cannot_be_held_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="pages of 16 tokens"):
        Wrapper().plan([1], [1], page=16)
    with pytest.raises(WorkspaceTooSmall, match="lower --chunked-prefill-size"):
        Wrapper(floats=1000).plan([1], [8192])
    monkeypatch.setattr(module, "SETTINGS", module.Settings())
    with pytest.raises(ValueError, match="order None"):
        Wrapper().plan([1], [1])


def test_workspace_holds_the_largest_steps():
    needed = module.workspace_needed(ORDER, 2048, HEADS, batch=256)
    wrapper = Wrapper(floats=needed)
    wrapper.plan([2048], [8192])
    wrapper.plan([1024, 1024], [8192, 8192])
    wrapper.plan([1] * 256, [100] * 256, graph=True)
    with pytest.raises(WorkspaceTooSmall):
        wrapper.plan([2049], [8192])
