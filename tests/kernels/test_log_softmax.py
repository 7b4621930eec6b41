"""Softmax and log_softmax in Triton: near their twins and fp64, and independent of the batch."""

from __future__ import annotations

import pytest
import torch
from cpu_support import DTYPES, EPSILON, dtypes

from sgl_det.kernels import log_softmax as module
from sgl_det.kernels import reference_gpu
from sgl_det.kernels.log_softmax import log_softmax, softmax
from sgl_det.kernels.order import ReductionOrder
from sgl_det.testing import assert_bitwise_equal

from .interpreter import DEVICE, MARKS, order_dtypes, pick

pytestmark = [*MARKS, pytest.mark.usefixtures("nan_filled_empty")]
# 2048 lanes and splits of 4096: within a tile, within a split, and with a ragged last split.
VOCABULARIES = pick(gpu=[7, 2048, 2049, 4097, 32000, 50257, 151936, 262144], interpreter=[7, 4100])
ROWS = pick(gpu=[1, 2, 3, 7, 8, 33, 129], interpreter=[1, 3])
MOST = max(ROWS)
vocabularies = pytest.mark.parametrize("v", VOCABULARIES, ids=lambda v: f"V{v}")
ops = pytest.mark.parametrize("op", [log_softmax, softmax], ids=lambda op: op.__name__)


def logits(v, dtype, n=MOST):
    torch.manual_seed(v)
    return (torch.randn(n, v) * 4).to(dtype).to(DEVICE)


@vocabularies
@dtypes
@pytest.mark.parametrize("out", [None, torch.float32], ids=["same", "fp32"])
def test_near_fp64(v, dtype, out):
    x = logits(v, dtype, 3)
    epsilon = EPSILON[out or dtype]
    exact = torch.log_softmax(x.double(), -1)
    y = log_softmax(x, out)
    assert y.dtype == (out or dtype)
    # Two differences, each rounded; the logarithm of a sum of fp32 exponentials.
    assert ((y.double() - exact).abs() <= 2 * epsilon * exact.abs() + 2**-20).all()
    # In fp32 the argument of exp, down to -40, is off by 2 ** -19.
    wrong = (softmax(x, out).double() - exact.exp()).abs()
    smallest = torch.finfo(out or dtype).tiny
    assert (wrong <= (epsilon + 2**-17) * exact.exp() + smallest).all()


@vocabularies
@dtypes
@ops
def test_near_its_twin(v, dtype, op):
    x = logits(v, dtype, 3)
    twin = getattr(reference_gpu, op.__name__)(x)
    # One step of dtype: where exp or log differ in their last digit, a rounding may fall elsewhere.
    relative = 2 * EPSILON[dtype] + 2**-17
    wrong = (op(x).double() - twin.double()).abs()
    assert (wrong <= relative * twin.double().abs() + 2**-20).all()


@vocabularies
@order_dtypes
@ops
@pytest.mark.parametrize("count", ROWS[:-1], ids=lambda n: f"N{n}")
def test_row_does_not_depend_on_its_batch(v, dtype, op, count):
    x = logits(v, dtype)
    whole = op(x)
    for where in (0, (MOST - count) // 2, MOST - count):
        part = slice(where, where + count)
        assert_bitwise_equal(op(x[part]), whole[part], f"row {where}")


@vocabularies
@ops
def test_neighbours_do_not_show(v, op):
    x = logits(v, torch.float32, 5)
    noise = torch.full_like(x, float("nan"))
    noise[2] = x[2]
    assert_bitwise_equal(op(noise)[2], op(x)[2])


@vocabularies
@order_dtypes
@ops
def test_strides_and_alignment_do_not_show(v, dtype, op):
    x = logits(v, dtype, 3)
    wide = torch.zeros(3, v + 5, dtype=dtype, device=DEVICE)
    assert_bitwise_equal(op(wide[:, 1 : v + 1].copy_(x)), op(x))


@ops
@pytest.mark.parametrize("warps", pick(gpu=[1, 4, 16], interpreter=[4]))
def test_warps_do_not_show(op, warps, monkeypatch):
    """Why they are not in the order: every step of the tree adds two numbers, in any layout."""
    x = logits(VOCABULARIES[-2], torch.float32, 3)
    expected = op(x)
    monkeypatch.setattr(module.rows, "warps", lambda order: warps)
    assert_bitwise_equal(op(x), expected)


@vocabularies
@ops
def test_masked_splits_add_exactly_nothing(v, op):
    """A grammar leaves few tokens: whole splits are -inf, at either end.

    exp(-1000) is 0 in fp32, but not by way of a split that has no finite element.
    """
    x = logits(v, torch.float32, 2)
    for seen in (slice(0, 5), slice(v - 5, v)):
        masked, faint = (torch.full_like(x, low) for low in (float("-inf"), -1000.0))
        masked[:, seen] = faint[:, seen] = x[:, seen]
        assert_bitwise_equal(op(masked)[:, seen], op(faint)[:, seen])
        assert (softmax(masked) > 0).sum() == 2 * 5


def test_rows_without_a_finite_element():
    x = torch.full((2, 5000), float("-inf"), device=DEVICE)
    x[1, 3] = 0.0
    for op in (log_softmax, softmax):
        y = op(x)
        assert y[0].isnan().all() and not y[1].isnan().any()


@ops
def test_control_a_split_size_that_sees_the_batch_shows(op, monkeypatch):
    x = logits(VOCABULARIES[-1], torch.float32)
    alone = op(x)

    def smaller(*, v, dtype, arch=None):
        return ReductionOrder(axis="V", block=512, lanes=512, split=1024)

    # As a kernel would that cuts rows finer when it has few of them.
    monkeypatch.setattr(module, "reduction_order", smaller)
    monkeypatch.setattr(module, "SPLIT", 1024)
    with pytest.raises(AssertionError, match="differ"):
        assert_bitwise_equal(op(x), alone)


def test_leading_axes_and_no_rows():
    x = logits(100, torch.float32, 6)
    assert_bitwise_equal(log_softmax(x.view(2, 3, 100)).view(6, 100), log_softmax(x))
    assert_bitwise_equal(log_softmax(x[0]), log_softmax(x)[0])
    assert softmax(x[:0]).shape == (0, 100)


def test_what_does_not_fit_is_refused():
    x = logits(64, torch.float32, 4)
    for wrong, reason in (
        ((x.double(), torch.float32), "x is torch.float64"),
        ((x, torch.int32), "for a result of torch.int32"),
        ((x.t(),), "stride 1 along V"),
        ((x[:, :0],), "V > 0"),
    ):
        with pytest.raises(ValueError, match=reason):
            log_softmax(*wrong)
    with pytest.raises(ValueError, match="no reduction order"):
        module.reduction_order(v=0, dtype=DTYPES[0])
