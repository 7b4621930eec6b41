"""The public comparisons of sgl_det.testing."""

from __future__ import annotations

import pytest
import torch

from sgl_det.testing import assert_bitwise_equal, first_divergence


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool], ids=str
)
def test_bitwise_equal_tensors_pass(dtype):
    x = torch.arange(12).reshape(3, 4).to(dtype)
    assert_bitwise_equal(x.clone(), x)
    assert_bitwise_equal(x.t().contiguous().t(), x)
    assert_bitwise_equal(x[:0], x[:0])


def test_nan_equals_itself_and_zero_has_a_sign():
    assert_bitwise_equal(torch.tensor(float("nan")), torch.tensor(float("nan")))
    with pytest.raises(AssertionError, match=r"1 of 1 elements.*-0x0.0p\+0 \(0x80000000\)"):
        assert_bitwise_equal(torch.tensor(-0.0), torch.tensor(0.0))


def test_the_first_difference_is_named():
    x = torch.zeros(4, 5)
    y = x.clone()
    y[2, 3], y[3, 0] = 1.0, 2.0
    with pytest.raises(
        AssertionError, match=r"out: 2 of 20 .* at \(2, 3\): 0x1.0.*, expected 0x0.0"
    ):
        assert_bitwise_equal(y, x, "out")


def test_shape_and_dtype_come_first():
    with pytest.raises(AssertionError, match=r"shape is \(2,\), expected \(1, 2\)"):
        assert_bitwise_equal(torch.zeros(2), torch.zeros(1, 2))
    with pytest.raises(AssertionError, match="dtype is torch.float16"):
        assert_bitwise_equal(torch.zeros(2).half(), torch.zeros(2))


def test_first_divergence():
    assert (
        first_divergence(([1, 2], [-1.0, -2.0]), ([1, 2], ["-0x1.0000000000000p+0", -2.0])) is None
    )
    found = first_divergence(([1, 2], [-1.0, -2.0]), ([1], [-1.0]))
    assert (found.index, found.tokens) == (1, (2, None))
    assert first_divergence(([1, 2], None), ([1, 3], [0.0, 0.0])).tokens == (2, 3)
    with pytest.raises(ValueError, match="2 token ids and 1 logprobs"):
        first_divergence(([1, 2], [0.0]), ([1, 2], [0.0, 0.0]))


def test_one_element_of_any_stride_is_compared():
    x = torch.arange(6.0).view(2, 3)
    assert_bitwise_equal(x[:1, 1::2], x[:1, 1:2].clone())
