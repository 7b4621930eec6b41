"""The persistent kernel for many rows: the bits of `matmul`, for every tile and grid."""

from __future__ import annotations

import pytest
import torch
from cpu_support import DTYPES

from sgl_det.kernels import matmul_tma as module
from sgl_det.kernels.linear_candidates import Shape
from sgl_det.kernels.linear_data import operands
from sgl_det.kernels.matmul import Tile, matmul
from sgl_det.kernels.matmul_tma import matmul_tma
from sgl_det.testing import assert_bitwise_equal

from .interpreter import DEVICE, MARKS, pick

OLD = torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0)
pytestmark = [
    *MARKS,
    pytest.mark.usefixtures("nan_filled_empty"),
    pytest.mark.skipif(OLD, reason="needs a GPU with TMA, sm_90 or later"),
]
TILES = pick(gpu=list(module.TILES), interpreter=[Tile(m=16, n=32, k=16, group=2)])
# M below, at and above edges of tiles; N and K that end inside a tile.
SHAPES = pick(
    gpu=[(129, 6144, 4096), (300, 1024, 3072), (1000, 200, 1000), (1, 8, 8), (128, 256, 64)],
    interpreter=[(1, 8, 8), (16, 32, 16), (37, 72, 40)],
)
tiles = pytest.mark.parametrize("tile", TILES, ids=lambda t: t.name)
shapes = pytest.mark.parametrize("m, n, k", SHAPES, ids=str)
sixteen = pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
PROGRAMS = None if DEVICE == "cuda" else 3


def tensors(m, n, k, dtype, kind="cancelling"):
    shape = Shape(n=n, k=k, dtype=dtype, bias=True)
    return operands(kind, shape, m, DEVICE)


@shapes
@tiles
@sixteen
@pytest.mark.parametrize("kind", ["realistic", "cancelling"])
def test_has_the_bits_of_matmul(m, n, k, tile, dtype, kind):
    x, weight, bias = tensors(m, n, k, dtype, kind)
    for b in (None, bias):
        y = matmul_tma(x, weight, b, tile=tile, programs=PROGRAMS)
        assert_bitwise_equal(y, matmul(x, weight, b))


@tiles
@pytest.mark.parametrize("programs", pick(gpu=[1, 7, 1000], interpreter=[1, 2, 1000]))
def test_number_of_programs_does_not_show(tile, programs):
    x, weight, bias = tensors(*SHAPES[-1], torch.bfloat16)
    y = matmul_tma(x, weight, bias, tile=tile, programs=programs)
    assert_bitwise_equal(y, matmul(x, weight, bias))


@tiles
def test_padded_rows_and_neighbours_do_not_show(tile):
    x, weight, bias = tensors(37, 72, 40, torch.float16)
    expected = matmul(x, weight, bias)
    wide = torch.full((37, 56), float("nan"), dtype=x.dtype, device=DEVICE)
    part = wide[:, 8:48].copy_(x)
    noise = torch.full_like(x, float("nan"))
    noise[4] = x[4]
    for given, rows in ((part, slice(0, 37)), (x.t().contiguous().t(), slice(0, 37)), (noise, 4)):
        y = matmul_tma(given, weight, bias, tile=tile, programs=PROGRAMS)
        assert_bitwise_equal(y[rows], expected[rows])


def test_no_rows():
    x, weight, bias = tensors(4, 16, 32, torch.bfloat16)
    assert matmul_tma(x[:0], weight, bias, programs=1).shape == (0, 16)


def test_what_does_not_fit_is_refused():
    x, weight, bias = tensors(4, 16, 32, torch.bfloat16)
    shifted = x.new_zeros(4 * 32 + 1)[1:].view(4, 32)
    padded = x.new_zeros(4, 33)[:, :32]
    for wrong in (
        (shifted, weight),
        (padded, weight),
        (x, weight[:12]),
        (x[:, :20].contiguous(), weight[:, :20].contiguous()),
        (x.float(), weight.float()),
    ):
        assert not module.holds(*wrong)
        with pytest.raises(ValueError, match="multiples of 16 bytes"):
            matmul_tma(*wrong, programs=1)
    for wrong in ((x, weight[:, :16]), (x, weight, bias[:8])):
        with pytest.raises(ValueError, match="do not fit"):
            matmul_tma(*wrong, programs=1)
    with pytest.raises(ValueError, match="the dtypes are"):
        matmul_tma(x, weight.half(), programs=1)
