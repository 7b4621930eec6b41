"""Sums along rows and means in Triton: equal to their twins, near fp64, whatever the batch."""

from __future__ import annotations

import pytest
import torch
from cpu_support import EPSILON, dtypes, spread

from sgl_det.kernels import mean as module
from sgl_det.kernels import reference_gpu, row_sum
from sgl_det.kernels.mean import mean
from sgl_det.kernels.order import ReductionOrder
from sgl_det.testing import assert_bitwise_equal

from .interpreter import DEVICE, MARKS, order_dtypes, pick

pytestmark = [*MARKS, pytest.mark.usefixtures("nan_filled_empty")]
# 2048 lanes and splits of 4096; above 4096 * 4096 the splits' sums have splits of their own.
LENGTHS = pick(
    gpu=[1, 7, 128, 2048, 2049, 4096, 4097, 50257, 151936, 262144], interpreter=[1, 300, 4100]
)
# A program holds 2048 // V short rows.
ROWS = pick(gpu=[1, 2, 3, 7, 8, 15, 17, 33, 300], interpreter=[1, 9])
MOST = max(ROWS)
lengths = pytest.mark.parametrize("v", LENGTHS, ids=lambda v: f"V{v}")


def values(v, dtype, n=MOST):
    torch.manual_seed(v)
    return spread(n, v, dtype=dtype).to(DEVICE)


@lengths
@dtypes
def test_equals_its_twin(v, dtype):
    x = values(v, dtype, 3)
    assert_bitwise_equal(row_sum.row_sum(x), reference_gpu.row_sum(x), "row_sum")
    assert_bitwise_equal(mean(x, -1), reference_gpu.mean(x, -1), "mean")
    fp32 = mean(x, 1, dtype=torch.float32)
    assert_bitwise_equal(fp32, reference_gpu.mean(x, 1, dtype=torch.float32), "mean in fp32")


@lengths
@dtypes
def test_near_fp64(v, dtype):
    x = values(v, dtype, 3)
    # Each element takes part in less than 32 roundings; the sum of magnitudes bounds them.
    bound = 2**-19 * x.double().abs().sum(1)
    exact = x.double().sum(1)
    assert ((row_sum.row_sum(x).double() - exact).abs() <= bound).all()
    wrong = (mean(x, 1).double() - exact / v).abs()
    assert (wrong <= bound / v + EPSILON[dtype] * (exact / v).abs() + 1e-7).all()


@lengths
@order_dtypes
@pytest.mark.parametrize("count", ROWS[:-1], ids=lambda n: f"N{n}")
def test_row_does_not_depend_on_its_batch(v, dtype, count):
    x = values(v, dtype)
    whole = row_sum.row_sum(x)
    for where in (0, (MOST - count) // 2, MOST - count):
        part = slice(where, where + count)
        assert_bitwise_equal(row_sum.row_sum(x[part]), whole[part], f"row {where}")


@lengths
@order_dtypes
def test_strides_and_alignment_do_not_show(v, dtype):
    """They decide how wide a load may be, so also which thread holds which element."""
    x = values(v, dtype, 5)
    wide = torch.zeros(5, v + 5, dtype=dtype, device=DEVICE)
    assert_bitwise_equal(row_sum.row_sum(wide[:, 1 : v + 1].copy_(x)), row_sum.row_sum(x))


@pytest.mark.parametrize("v", [LENGTHS[1], LENGTHS[-1]], ids=lambda v: f"V{v}")
@pytest.mark.parametrize("warps", pick(gpu=[1, 2, 4, 8, 16], interpreter=[4]))
def test_warps_and_rows_a_program_do_not_show(v, warps, monkeypatch):
    """Why neither is in the order: every step of the tree adds two numbers, in any layout."""
    x = values(v, torch.float32, 5)
    expected = row_sum.row_sum(x)
    monkeypatch.setattr(row_sum, "warps", lambda order: warps)
    for rows in (1, 4):
        monkeypatch.setattr(row_sum, "rows_a_program", lambda order, rows=rows: rows)
        assert_bitwise_equal(row_sum.row_sum(x), expected, f"{warps} warps, {rows} rows")


@dtypes
@pytest.mark.parametrize("keepdim", [False, True], ids=["squeezed", "kept"])
@pytest.mark.parametrize("dim", [0, 1, -2, 3, (2, 3), [1, -2, -1]], ids=str)
def test_one_axis_or_the_last_ones(dim, keepdim, dtype):
    x = spread(2, 3, 5, 4, dtype=dtype).to(DEVICE).transpose(0, 1)
    y = mean(x, dim, keepdim)
    exact = x.double().mean(dim, keepdim)
    assert y.shape == exact.shape and y.dtype == dtype
    assert ((y.double() - exact).abs() <= EPSILON[dtype] * exact.abs() + 2**-19).all()


def test_order_follows_the_length_and_not_the_axis():
    x = spread(3, 777, 5).to(DEVICE)
    expected = mean(x.movedim(1, -1).contiguous(), -1)
    assert_bitwise_equal(mean(x, 1), expected)
    assert_bitwise_equal(mean(x[1:2, :, 2:4], 1), expected[1:2, 2:4])


@pytest.mark.parametrize("v", [v for v in LENGTHS if v > 4096], ids=lambda v: f"V{v}")
def test_control_a_tile_that_sees_the_batch_shows(v, monkeypatch):
    x = values(v, torch.float32)
    expected = row_sum.row_sum(x)

    def narrower(*, v, dtype, arch=None):
        return ReductionOrder(axis="V", block=256, lanes=256, split=512 if v > 512 else None)

    # As a kernel would that takes narrower tiles when it has many rows.
    monkeypatch.setattr(row_sum, "reduction_order", narrower)
    monkeypatch.setattr(row_sum, "SPLIT", 512)
    with pytest.raises(AssertionError, match="differ"):
        assert_bitwise_equal(row_sum.row_sum(x), expected)


def test_no_rows():
    x = values(100, torch.float32, 4)
    assert row_sum.row_sum(x[:0]).shape == (0,)
    assert mean(x[:0], 1, keepdim=True).shape == (0, 1)


def test_what_does_not_fit_is_refused():
    x = values(64, torch.float32, 4)
    for wrong, reason in (
        ((x.double(), 1), "torch.float64"),
        ((x, 2), "expected one axis or the last ones"),
        ((x, ()), "expected one axis or the last ones"),
        ((x, (1, 1)), "expected one axis or the last ones"),
        ((x.view(2, 2, 64), (0, 1)), "expected one axis or the last ones"),
        ((x[:, :0], 1), "0 elements"),
    ):
        with pytest.raises(ValueError, match=reason):
            mean(*wrong)
    with pytest.raises(ValueError, match="stride 1 along V"):
        row_sum.row_sum(x.t())
    assert module.reduction_order(r=64, dtype=x.dtype).axis == "R"
