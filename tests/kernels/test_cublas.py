"""PyTorch's own products with split-K forbidden: what was set before comes back."""

from __future__ import annotations

import pytest
import torch

from sgl_det.kernels import cublas
from sgl_det.kernels.cublas import no_split_k
from sgl_det.testing import assert_bitwise_equal

FLAGS = torch.backends.cuda.matmul
NAMES = [f"{name}{end}" for name in cublas._REDUCTIONS for end in ("", "_split_k")]


def flags():
    library = torch.backends.cuda.preferred_blas_library()
    return library, {name: getattr(FLAGS, name) for name in NAMES}


FORBIDDEN = dict.fromkeys(NAMES, False)


@pytest.fixture(params=["default", "fp32 sums", "one of two"])
def before(request):
    """Several settings that may have been there before."""
    found = flags()
    values = {
        "default": [(True, True), (True, True)],
        "fp32 sums": [(False, True), (False, True)],
        "one of two": [(False, False), (True, True)],
    }[request.param]
    for name, value in zip(cublas._REDUCTIONS, values, strict=True):
        setattr(FLAGS, name, value)
    yield flags()
    for name in cublas._REDUCTIONS:
        setattr(FLAGS, name, (found[1][name], found[1][f"{name}_split_k"]))
    assert flags() == found


def assert_forbidden():
    library, values = flags()
    assert values == FORBIDDEN and "lt" in str(library).lower()


def test_forbidden_inside_and_as_before_outside(before):
    with no_split_k():
        assert_forbidden()
    assert flags() == before


def test_as_before_after_an_exception(before):
    with pytest.raises(KeyError), no_split_k():
        assert_forbidden()
        raise KeyError
    assert flags() == before


def test_nested_blocks_end_one_by_one(before):
    with no_split_k():
        with pytest.raises(KeyError), no_split_k():
            raise KeyError
        assert_forbidden()
        with no_split_k():
            assert_forbidden()
        assert_forbidden()
    assert flags() == before


def test_forbidden_until_undone(before):
    undo = cublas.forbid_split_k()
    with no_split_k():
        assert_forbidden()
    assert_forbidden()
    undo()
    assert flags() == before


def test_original_is_pytorchs_kernel():
    x, weight, bias = torch.randn(5, 48), torch.randn(24, 48), torch.randn(24)
    assert_bitwise_equal(cublas.original("mm", "CPU")(x, weight.t()), torch.mm(x, weight.t()))
    scaled = cublas.original("addmm", "CPU")(bias, x, weight.t(), beta=0.5, alpha=2)
    assert_bitwise_equal(scaled, torch.addmm(bias, x, weight.t(), beta=0.5, alpha=2))
    assert cublas.original("mm", "CPU") is cublas.original("mm", "CPU")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_linear_is_pytorchs(dtype, bias):
    x, weight = (torch.randn(n, 512, dtype=dtype, device="cuda") for n in (33, 256))
    b = torch.randn(256, dtype=dtype, device="cuda") if bias else None
    with no_split_k():
        expected = torch.nn.functional.linear(x, weight, b)
        assert_bitwise_equal(cublas.linear(x, weight, b), expected)
