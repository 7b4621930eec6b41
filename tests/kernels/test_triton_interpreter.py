"""bf16 arithmetic of a Triton kernel equals PyTorch's: in the interpreter, thanks to our fix."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from sgl_det.testing import assert_bitwise_equal

from .interpreter import DEVICE, MARKS

pytestmark = MARKS


@triton.jit
def _arithmetic_kernel(a_ptr, b_ptr, y_ptr, OP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a, b = tl.load(a_ptr + i), tl.load(b_ptr + i)
    if OP == "add":
        y = a + b
    elif OP == "mul":
        y = a * b
    elif OP == "less":
        y = tl.where(a < b, a, b)
    else:
        y = a.to(tl.float32) * 1.01
    tl.store(y_ptr + i, y.to(y_ptr.dtype.element_ty))


@triton.jit
def _dot_kernel(a_ptr, b_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    at = i[:, None] * BLOCK + i[None, :]
    tl.store(y_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


OPS = {
    "add": torch.add,
    "mul": torch.mul,
    "less": torch.minimum,
    "round": lambda a, b: (a.float() * 1.01).bfloat16(),
}


@pytest.mark.parametrize("op", OPS)
def test_arithmetic_is_rounded_as_in_pytorch(op):
    torch.manual_seed(0)
    # Far apart in magnitude: subnormal products, ties and carries into the exponent all occur.
    a, b = (torch.randn(2, 4096) * 10 ** (torch.rand(2, 4096) * 60 - 30)).bfloat16().to(DEVICE)
    a[:3], b[:3] = torch.tensor([float("inf"), 0.0, -0.0]), torch.tensor([1.0, 2.0, 3.0])
    y = torch.empty_like(a)
    _arithmetic_kernel[(1,)](a, b, y, OP=op, BLOCK=4096)
    assert_bitwise_equal(y, OPS[op](a, b), op)


def test_dot_multiplies_the_numbers_not_their_bits():
    torch.manual_seed(0)
    a, b = torch.randint(-8, 8, (2, 32, 32), device=DEVICE).bfloat16()
    y = torch.empty(32, 32, device=DEVICE)
    _dot_kernel[(1,)](a, b, y, BLOCK=32)
    # Whole numbers: every order of the sum is exact.
    assert_bitwise_equal(y, (a.double() @ b.double()).float())
