"""The batched product's Triton kernel: near fp64, and in the linear layer's order."""

from __future__ import annotations

import pytest
import torch
from cpu_support import DTYPES, EPSILON, dtypes

from sgl_det.kernels.bmm import bmm
from sgl_det.kernels.linear_candidates import Shape
from sgl_det.kernels.linear_data import operands
from sgl_det.kernels.matmul import matmul
from sgl_det.testing import assert_bitwise_equal

from .interpreter import DEVICE, MARKS, pick

pytestmark = [*MARKS, pytest.mark.usefixtures("nan_filled_empty")]
# (L, M, N, K): heads of an attention layer, and sizes that are no multiple of a tile.
SHAPES = pick(
    gpu=[(16, 300, 128, 512), (3, 65, 33, 71), (130, 1, 512, 128)],
    interpreter=[(2, 33, 40, 64), (3, 5, 33, 71)],
)
shapes = pytest.mark.parametrize("many, m, n, k", SHAPES, ids=str)


def tensors(many, m, n, k, dtype, kind="cancelling"):
    """a [L, M, K] and b [L, K, N] whose products show their order."""
    pairs = [operands(kind, Shape(n=n, k=k, dtype=dtype), m, DEVICE, seed) for seed in range(many)]
    return torch.stack([p.x for p in pairs]), torch.stack([p.weight.t() for p in pairs])


@shapes
@dtypes
def test_near_fp64(many, m, n, k, dtype):
    a, b = tensors(many, m, n, k, dtype, "realistic")
    y, exact = bmm(a, b), a.double() @ b.double()
    norm = (a.double().square() @ b.double().square()).sqrt()
    # One rounding to the dtype; K additions, of which each may lose a bit of the partial sum.
    bound = EPSILON[dtype] * exact.abs() + k * 2**-22 * norm + 1e-9
    assert y.dtype == dtype and y.shape == (many, m, n)
    assert ((y.double() - exact).abs() <= bound).all()


@shapes
@dtypes
def test_has_the_order_of_the_linear_layer(many, m, n, k, dtype):
    """So a product has one value, whether a model asks for it alone or among others."""
    a, b = tensors(many, m, n, k, dtype)
    y = bmm(a, b)
    for i in (0, many // 2, many - 1):
        assert_bitwise_equal(y[i], matmul(a[i], b[i].t().contiguous()), f"matrix {i}")


@shapes
@pytest.mark.parametrize("dtype", pick(gpu=DTYPES, interpreter=DTYPES[2:]), ids=str)
def test_row_does_not_depend_on_its_batch(many, m, n, k, dtype):
    a, b = tensors(many, m, n, k, dtype)
    whole = bmm(a, b)
    for i in (0, many - 1):
        assert_bitwise_equal(bmm(a[i : i + 1], b[i : i + 1]), whole[i : i + 1], f"matrix {i}")
    for count in sorted({1, min(2, m), m - 1, m} - {0}):
        for where in (0, (m - count) // 2, m - count):
            rows = slice(where, where + count)
            assert_bitwise_equal(bmm(a[:, rows], b), whole[:, rows], f"{count} from row {where}")
    assert_bitwise_equal(bmm(a, b[:, :, 1:3]), whole[:, :, 1:3], "columns")


@dtypes
def test_strides_do_not_show(dtype):
    a, b = tensors(3, 5, 40, 71, dtype)
    expected = bmm(a, b)
    by_rows = a.transpose(0, 1).contiguous().transpose(0, 1)
    by_columns = a.transpose(1, 2).contiguous().transpose(1, 2)
    assert_bitwise_equal(bmm(by_rows, b), expected, "a as [M, L, K]")
    assert_bitwise_equal(bmm(by_columns, b), expected, "a by columns")
    assert_bitwise_equal(bmm(a, b.transpose(1, 2).contiguous().transpose(1, 2)), expected, "b")
    one = bmm(a[:1].expand(3, -1, -1), b)
    assert_bitwise_equal(one[1:], bmm(a[:1].repeat(3, 1, 1), b)[1:], "one a for all")


@dtypes
def test_neighbours_do_not_show(dtype):
    a, b = tensors(3, 9, 40, 71, dtype)
    expected, noise = bmm(a, b)[1, 4], torch.full_like(a, float("nan"))
    noise[1, 4] = a[1, 4]
    assert_bitwise_equal(bmm(noise, b)[1, 4], expected)


def test_control_another_order_shows():
    a, b = tensors(*SHAPES[0], torch.float32)
    half = a.shape[2] // 2
    split = bmm(a[..., :half], b[:, :half]) + bmm(a[..., half:], b[:, half:])
    with pytest.raises(AssertionError, match="differ"):
        assert_bitwise_equal(split, bmm(a, b))


def test_nothing_to_compute():
    a, b = tensors(2, 4, 8, 16, torch.float32)
    assert bmm(a[:0], b[:0]).shape == (0, 4, 8)
    assert bmm(a[:, :0], b).shape == (2, 0, 8)
    assert bmm(a, b[..., :0]).shape == (2, 4, 0)
    assert_bitwise_equal(bmm(a[..., :0], b[:, :0]), torch.zeros(2, 4, 8, device=DEVICE), "K = 0")


def test_what_does_not_fit_is_refused():
    a, b = tensors(2, 4, 8, 16, torch.float32)
    for wrong in ((a[0], b), (a, b[0]), (a[:1], b), (a[..., :15], b)):
        with pytest.raises(ValueError, match="do not fit"):
            bmm(*wrong)
    for wrong in ((a.half(), b), (a.double(), b.double()), (a.int(), b.int())):
        with pytest.raises(ValueError, match="the dtypes are"):
            bmm(*wrong)
