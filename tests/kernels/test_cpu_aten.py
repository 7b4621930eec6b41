"""PyTorch's own matrix products while the dispatcher leads them to the CPU kernel."""

from __future__ import annotations

import pytest
import torch
from cpu_support import spread

from sgl_det.kernels import cpu, cpu_aten
from sgl_det.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def overridden():
    library = cpu_aten.override()
    yield
    library._destroy()


def test_every_spelling_is_the_kernel(overridden):
    x, w, bias = spread(9, 700), spread(33, 700), spread(33)
    expected = cpu.linear(x, w)
    spellings = {
        "mm": torch.mm(x, w.t()),
        "matmul": torch.matmul(x, w.T),
        "linear": torch.nn.functional.linear(x, w),
        "einsum": torch.einsum("mk,nk->mn", x, w),
        "dense second operand": x @ w.t().contiguous(),
        "bmm": torch.bmm(x[None], w.t()[None])[0],
        "three axes": torch.nn.functional.linear(x.view(3, 3, 700), w).view(9, 33),
    }
    for name, y in spellings.items():
        assert_bitwise_equal(y, expected, name)
    with_bias = cpu.linear(x, w, bias)
    assert_bitwise_equal(torch.nn.functional.linear(x, w, bias), with_bias, "linear with bias")
    scaled = torch.addmm(bias, x, w.t(), beta=2, alpha=3)
    assert_bitwise_equal(scaled, expected * 3 + bias * 2, "addmm with factors")


def test_other_types_keep_their_code(overridden):
    x = torch.arange(6).view(2, 3)
    assert (x @ x.T).tolist() == [[5, 14], [14, 50]]
    assert (x.double() @ x.double().T).tolist() == [[5.0, 14.0], [14.0, 50.0]]
    assert torch.bmm(x.double()[None], x.double().T[None]).shape == (1, 2, 2)
    assert torch.bmm(torch.ones(0, 2, 3), torch.ones(0, 3, 4)).shape == (0, 2, 4)


def test_control_without_the_override_the_rows_depend_on_the_batch():
    x, w = spread(64, 3072), spread(256, 3072)
    with pytest.raises(AssertionError, match="differ in their bits"):
        assert_bitwise_equal(torch.mm(x[:1], w.t()), torch.mm(x, w.t())[:1])
