"""On a GPU, at models' sizes: every tile has the canonical bits, and what was proven serves.

The interpreter adds in one order whatever the tile; here the matrix units are asked.
"""

from __future__ import annotations

import pytest
import torch
from cpu_support import DTYPES

from sgl_det.kernels import cublas, linear, linear_candidates, linear_setup, matmul_tma
from sgl_det.kernels.linear_candidates import Candidate, Shape, candidates
from sgl_det.kernels.linear_data import operands
from sgl_det.kernels.linear_proof import EDGES, prove
from sgl_det.kernels.linear_timing import Timer
from sgl_det.kernels.matmul import CANONICAL, matmul
from sgl_det.testing import assert_bitwise_equal

pytestmark = pytest.mark.gpu
# (N, K) of qkv, down and key layers of 8B and 0.6B models, whole and split over GPUs.
SHAPES = [(6144, 4096), (4096, 12288), (1024, 3072), (768, 4096)]
# Both sides of every bucket's edge, and some numbers of rows inside the buckets.
ROWS = sorted({m for e in EDGES for m in (e - 1, e, e + 1)} - {0} | {*range(1, 300, 23), 300, 3000})
TILES = [*(t for *_, t in linear_candidates._SMALL), linear_candidates._LARGE]
OLD = torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0)
shapes = pytest.mark.parametrize("n, k", SHAPES, ids=str)


def fits(tile, size=2):
    limit = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    return tile.shared_bytes(size) <= limit


def assert_same_bits(run, data, expected, most):
    """run(rows) is the same rows of ``expected``: the first ones, and the last."""
    for m in (m for m in ROWS if m <= most):
        for at in sorted({0, len(expected) - m}):
            rows = slice(at, at + m)
            y = run(data.x[rows], data.weight, data.bias)
            assert_bitwise_equal(y, expected[rows], f"{m} rows from row {at}")


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def layer(request):
    """Operands whose exact results are zero, and the canonical results, in bf16."""
    n, k = request.param
    data = operands("cancelling", Shape(n=n, k=k, dtype=torch.bfloat16), ROWS[-1], "cuda")
    return data, matmul(*data)


@pytest.mark.parametrize("tile", TILES, ids=lambda t: t.name)
def test_tile_has_the_canonical_bits(layer, tile):
    if not fits(tile):
        pytest.skip("does not fit this GPU, and is not offered there")
    data, expected = layer
    # A tile of few rows is slow for many; 32 of them have every edge that a grid can have.
    assert_same_bits(lambda x, w, b: matmul(x, w, b, tile=tile), data, expected, 32 * tile.m + 1)


@pytest.mark.skipif(OLD, reason="needs a GPU with TMA, sm_90 or later")
@pytest.mark.parametrize("tile", [*matmul_tma.TILES, *matmul_tma.NARROW], ids=lambda t: t.name)
def test_tma_tile_has_the_canonical_bits(layer, tile):
    data, expected = layer
    assert_same_bits(
        lambda x, w, b: matmul_tma.matmul_tma(x, w, b, tile=tile), data, expected, ROWS[-1]
    )


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_tiles_of_other_dtypes(dtype):
    data = operands("cancelling", Shape(n=768, k=4096, dtype=dtype, bias=True), 600, "cuda")
    expected = matmul(*data)
    for tile in TILES if dtype == torch.float16 else linear_candidates._FP32:
        if fits(tile, dtype.itemsize):
            for m in (1, 2, 15, 17, 65, 600):
                y = matmul(data.x[:m], data.weight, data.bias, tile=tile)
                assert_bitwise_equal(y, expected[:m], f"{tile.name}, {m} rows")


@shapes
@pytest.mark.parametrize("m", [1, 64, 3000])
def test_error_is_not_above_that_of_pytorch(n, k, m):
    """Root mean square against float64; the rounding of the result is nearly all of it."""
    x, weight, _ = operands("realistic", Shape(n=n, k=k, dtype=torch.bfloat16), m, "cuda")
    exact = x.double() @ weight.double().t()
    ours, theirs = matmul(x, weight), torch.nn.functional.linear(x, weight)
    errors = [(y.double() - exact).square().mean().sqrt().item() for y in (ours, theirs)]
    assert errors[0] < 1.01 * errors[1], errors


def split_k(x, weight, bias):
    """As a library that splits K over more programs when it has few rows."""
    if len(x) > 2:
        return matmul(x, weight, bias)
    half = x.shape[1] // 2
    return matmul(x[:, :half], weight[:, :half], bias) + matmul(x[:, half:], weight[:, half:])


def test_control_a_split_shows(layer):
    data, expected = layer
    with pytest.raises(AssertionError, match="1 rows from row 0: .* differ"):
        assert_same_bits(split_k, data, expected, 4)


@shapes
def test_every_triton_candidate_is_proven(n, k):
    """cuBLAS may be rejected, as on a GPU that nobody has seen; our own kernels may not."""
    shape = Shape(n=n, k=k, dtype=torch.bfloat16)
    known = [*candidates(shape), Candidate(name="split-K", run=split_k)]
    with cublas.no_split_k():
        *verdicts, split = prove(shape, known, bucket_edges=EDGES[:12])
    ours = [v for v in verdicts if v.candidate.startswith("triton") and v.cases]
    assert len(ours) > 3 and not [v for v in ours if not v.proven]
    assert "differ at 1 rows from row 0" in split.reason and not {1, 2} & set(split.rows)


def test_what_is_set_up_serves_the_canonical_bits(monkeypatch):
    shape = Shape(n=768, k=4096, dtype=torch.bfloat16)
    layers = linear_setup.set_up([shape], cache=None, most_rows=512)
    data = operands("cancelling", shape, 1030, "cuda")
    plans = {s: found.plan for s, found in layers.items()}
    monkeypatch.setattr(linear, "PLANS", plans)
    with cublas.no_split_k():
        assert_same_bits(linear.linear, data, matmul(*data), 1030)


def test_the_faster_of_two_is_found():
    shape = Shape(n=4096, k=4096, dtype=torch.bfloat16)
    slow = Candidate(name="slow", run=lambda x, w, b: [matmul(x, w, b) for _ in range(3)][0])
    fast = Candidate(name="fast", run=matmul)
    name, us = Timer(shape, 64).fastest([slow, fast], 64)
    assert name == "fast" and 1 < us < 10_000


def test_canonical_tiles_fit():
    assert all(fits(tile, size) for size, tile in CANONICAL.items())
