"""The linear layer's Triton kernel: near fp64, and the same bits for a row in any batch."""

from __future__ import annotations

import pytest
import torch
from cpu_support import DTYPES, EPSILON, dtypes

from sgl_det.kernels import reference
from sgl_det.kernels.linear_candidates import Candidate, Shape
from sgl_det.kernels.linear_data import operands
from sgl_det.kernels.linear_proof import prove
from sgl_det.kernels.matmul import CANONICAL, Tile, matmul, reduction_order
from sgl_det.testing import assert_bitwise_equal

from .interpreter import DEVICE, MARKS, pick

pytestmark = [*MARKS, pytest.mark.usefixtures("nan_filled_empty")]
# (N, K): models' layers, and sizes that are no multiple of a tile or of 16 bytes.
SHAPES = pick(
    gpu=[(6144, 4096), (1024, 3072), (768, 4096), (200, 1000), (33, 71)],
    interpreter=[(40, 128), (33, 71)],
)
ROWS = pick(gpu=[1, 17, 300], interpreter=[5])
# Two tiles of other shapes than the canonical one, for any dtype.
TILES = [Tile(m=16, n=32, k=32, group=1), Tile(m=32, n=16, k=16, stages=2)]
# Both sides of the tile's edges: 32 rows in fp32, 64 otherwise.
MOST = pick(gpu=257, interpreter=66)
COUNTS = pick(gpu=[1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 256], interpreter=[1, 32, 33, 65])
shapes = pytest.mark.parametrize("n, k", SHAPES, ids=lambda v: str(v))
both_bias = pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])


def tensors(rows, n, k, dtype, bias=False, kind="realistic"):
    """x, weight and bias whose products show their order."""
    return operands(kind, Shape(n=n, k=k, dtype=dtype, bias=bias), rows, DEVICE)


def exact(x, weight, bias):
    """The fp64 result [M, N], and the norms of the products that each output adds [M, N]."""
    x, weight = x.double(), weight.double()
    y = x @ weight.T
    return y if bias is None else y + bias.double(), (x.square() @ weight.square().T).sqrt()


def assert_near(y, x, weight, bias):
    """One rounding to the dtype; K additions, of which each may lose a bit of the partial sum."""
    expected, norm = exact(x, weight, bias)
    wrong = (y.double() - expected).abs()
    bound = EPSILON[y.dtype] * expected.abs() + x.shape[1] * 2**-22 * norm + 1e-9
    assert y.shape == expected.shape and (wrong <= bound).all(), (wrong / bound).max()


@shapes
@dtypes
@both_bias
@pytest.mark.parametrize("rows", ROWS, ids=lambda m: f"M{m}")
def test_near_fp64(n, k, dtype, bias, rows):
    x, weight, b = tensors(rows, n, k, dtype, bias)
    y = matmul(x, weight, b)
    assert y.dtype == dtype
    assert_near(y, x, weight, b)


# A matrix unit adds 16 products in an order of its own; a multiply-add of fp32 has but one.
@pytest.mark.parametrize("dtype", pick(gpu=DTYPES[2:], interpreter=DTYPES[:2]), ids=str)
@shapes
@both_bias
def test_equals_its_twin(n, k, dtype, bias):
    x, weight, b = tensors(5, n, k, dtype, bias)
    twin = reference.linear(*(t if t is None else t.cpu() for t in (x, weight, b)))
    assert_bitwise_equal(matmul(x, weight, b).cpu(), twin)


@dtypes
@both_bias
@pytest.mark.parametrize("tile", TILES, ids=lambda t: t.name)
def test_tile_does_not_show(tile, dtype, bias):
    """More of them, at models' sizes, are in test_tiles.py."""
    x, weight, b = tensors(37, 72, 100, dtype, bias, kind="cancelling")
    assert_bitwise_equal(matmul(x, weight, b, tile=tile), matmul(x, weight, b))


@dtypes
def test_strides_do_not_show(dtype):
    """Neither of x, nor of the weight's rows, nor of a given output."""
    x, weight, bias = tensors(35, 40, 100, dtype, bias=True)
    expected = matmul(x, weight, bias)
    wide = torch.zeros(35, 211, dtype=dtype, device=DEVICE)
    slice_of_x = wide[:, 7:107].copy_(x)
    assert_bitwise_equal(matmul(slice_of_x, weight, bias), expected, "columns of a wider x")
    assert_bitwise_equal(matmul(x.t().contiguous().t(), weight, bias), expected, "x by columns")
    padded = torch.zeros(40, 103, dtype=dtype, device=DEVICE)[:, 3:].copy_(weight)
    assert_bitwise_equal(matmul(x, padded, bias), expected, "padded rows of the weight")


@dtypes
def test_writes_into_a_given_output_and_nothing_else(dtype):
    x, weight, bias = tensors(35, 40, 100, dtype, bias=True)
    around = torch.full((37, 60), 7.0, dtype=dtype, device=DEVICE)
    out = around[1:36, 11:51]
    assert matmul(x, weight, bias, out=out) is out
    assert_bitwise_equal(out, matmul(x, weight, bias))
    out.fill_(7.0)
    assert_bitwise_equal(around, torch.full_like(around, 7.0), "around the output")


@dtypes
def test_an_output_in_fp32_is_not_rounded(dtype):
    x, weight, bias = tensors(35, 40, 100, dtype, bias=True)
    out = torch.empty(35, 40, dtype=torch.float32, device=DEVICE)
    assert_bitwise_equal(matmul(x, weight, bias, out=out).to(dtype), matmul(x, weight, bias))
    expected, norm = exact(x, weight, bias)
    assert ((out.double() - expected).abs() <= 2**-15 * (norm + expected.abs())).all()


@shapes
@pytest.mark.parametrize("dtype", pick(gpu=DTYPES, interpreter=DTYPES[::2]), ids=str)
@pytest.mark.parametrize("count", COUNTS, ids=lambda m: f"M{m}")
def test_row_does_not_depend_on_its_batch(n, k, dtype, count):
    x, weight, _ = tensors(MOST, n, k, dtype, kind="cancelling")
    whole = matmul(x, weight)
    for where in (0, (MOST - count) // 2, MOST - count):
        rows = slice(where, where + count)
        assert_bitwise_equal(matmul(x[rows], weight), whole[rows], f"from row {where}")


@dtypes
def test_neighbours_do_not_show(dtype):
    x, weight, _ = tensors(9, 40, 100, dtype)
    noise = torch.full_like(x, float("nan"))
    noise[4] = x[4]
    assert_bitwise_equal(matmul(noise, weight)[4], matmul(x, weight)[4])


@dtypes
def test_column_does_not_depend_on_the_others(dtype):
    """As where a weight is split over GPUs by its outputs."""
    x, weight, bias = tensors(5, 100, 71, dtype, bias=True, kind="cancelling")
    whole = matmul(x, weight, bias)
    for columns in (slice(0, 1), slice(31, 97), slice(64, 100)):
        part = matmul(x, weight[columns], bias[columns])
        assert_bitwise_equal(part, whole[:, columns], str(columns))


def share_of_norm(y, x, weight):
    """The root mean square of the errors, of errors a norm large."""
    expected, norm = exact(x, weight, None)
    return ((y.double() - expected) / norm).square().mean().sqrt().item()


def tf32(x):
    """fp32 numbers cut to the ten mantissa bits that TF32 keeps."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def test_fp32_products_are_not_tf32():
    """TF32's products are wrong by about 2^-12 each; in fp32 the sum is wrong by 2^-20 or less."""
    x, weight, _ = tensors(33, *SHAPES[0], torch.float32)
    assert share_of_norm(matmul(x, weight), x, weight) < 2**-17


def test_control_tf32_products_show():
    x, weight, _ = tensors(33, *SHAPES[0], torch.float32)
    y = (tf32(x).double() @ tf32(weight).double().T).float()
    assert share_of_norm(y, x, weight) > 2**-14


def split_k(x, weight, bias=None):
    """As a library that splits K over more programs when it has few rows."""
    if len(x) > 2:
        return matmul(x, weight, bias)
    half = x.shape[1] // 2
    return matmul(x[:, :half], weight[:, :half], bias) + matmul(x[:, half:], weight[:, half:])


@pytest.mark.parametrize("count", [1, 2])
def test_control_a_split_that_sees_the_batch_shows(count):
    x, weight, _ = tensors(5, *SHAPES[0], torch.float32)
    whole = split_k(x, weight)
    with pytest.raises(AssertionError, match="differ"):
        assert_bitwise_equal(split_k(x[:count], weight), whole[:count])
    assert_bitwise_equal(split_k(x[:3], weight), whole[:3], "it is right for three rows")


def test_control_the_proof_rejects_the_split():
    known = [Candidate(name="split-K", run=split_k), Candidate(name="same", run=matmul)]
    shape = Shape(n=SHAPES[0][0], k=SHAPES[0][1], dtype=torch.float32)
    split, same = prove(shape, known, bucket_edges=(1, 2, 4, 8), device=DEVICE, dense=5)
    assert not split.proven and "elements differ at 1 rows from row 0" in split.reason
    assert same.proven and same.rows == (1, 2, 4, 8) and split.rows == (4, 8)


def test_nothing_to_compute():
    x, weight, bias = tensors(4, 40, 64, torch.float32, bias=True)
    assert matmul(x[:0], weight, bias).shape == (0, 40)
    assert matmul(x, weight[:0], bias[:0]).shape == (4, 0)
    assert_bitwise_equal(matmul(x[:, :0], weight[:, :0], bias), bias.expand(4, 40), "K = 0")


def test_what_does_not_fit_is_refused():
    x, weight, bias = tensors(4, 40, 64, torch.float32, bias=True)
    for args, reason in [
        ((x, weight[:, :32]), "do not fit"),
        ((x, weight, bias[:39]), "do not fit"),
        ((x, weight, bias[None]), "do not fit"),
        ((x.half(), weight), "the dtypes are"),
        ((x, weight, bias.half()), "the dtypes are"),
        ((x.double(), weight.double()), "expected one of"),
        ((x, weight.t().contiguous().t()), "expected 1 along K"),
        ((x, weight, bias.repeat(2)[::2]), "strides"),
    ]:
        with pytest.raises(ValueError, match=reason):
            matmul(*args)
    for out in (x.new_empty(4, 39), x.new_empty(4, 40).half(), x.new_empty(40, 4).t()):
        with pytest.raises(ValueError, match="out is"):
            matmul(x, weight, out=out)


def test_order_has_no_rows_and_no_other_dtypes():
    sixteen, single = (reduction_order(n=8, k=64, dtype=d, arch=90) for d in DTYPES[1:])
    assert (sixteen.axis, sixteen.block, single.block) == ("K", 16, 1)
    assert CANONICAL.keys() == {d.itemsize for d in DTYPES}
    with pytest.raises(ValueError, match="no matmul order for torch.int8"):
        reduction_order(n=8, k=64, dtype=torch.int8, arch=90)
