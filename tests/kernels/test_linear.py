"""The linear layer as it is served: which kernel a plan takes, and with what operands."""

from __future__ import annotations

import pytest
import torch
from linear_support import SHAPE, kernel, twin

from sgl_det.kernels import linear as module
from sgl_det.kernels import matmul
from sgl_det.kernels.linear import Plan, install, linear, plan
from sgl_det.testing import assert_bitwise_equal


class Recorder:
    """Kernels that say who ran, on how many rows."""

    def __init__(self):
        self.ran, self.operands = [], []

    def kernel(self, name):
        def run(x, weight, bias):
            self.ran.append((name, len(x)))
            self.operands.append((x, weight))
            return twin(x, weight, bias)

        return kernel(name, run)


@pytest.fixture
def recorder(monkeypatch):
    """The kernels of the only plan there is, for up to 2, 4 and 8 rows, and the canonical one."""
    recorder = Recorder()
    chosen = tuple(recorder.kernel(name) for name in ("few", "some", "many"))
    monkeypatch.setattr(module, "PLANS", {})
    monkeypatch.setattr(matmul, "matmul", recorder.kernel("canonical").run)
    install({SHAPE: Plan((2, 4, 8), chosen)})
    return recorder


def tensors(*rows, dtype=SHAPE.dtype):
    torch.manual_seed(0)
    return torch.randn(*rows, SHAPE.k).to(dtype), torch.randn(SHAPE.n, SHAPE.k).to(dtype)


@pytest.mark.parametrize(
    "rows, name",
    [(1, "few"), (2, "few"), (3, "some"), (4, "some"), (5, "many"), (8, "many")],
    ids=str,
)
def test_a_bucket_ends_at_its_edge(recorder, rows, name):
    x, weight = tensors(rows)
    assert_bitwise_equal(linear(x, weight), twin(x, weight, None))
    assert recorder.ran == [(name, rows)]


@pytest.mark.parametrize("rows", [9, 16, 17, 27])
def test_more_rows_than_the_last_edge_are_computed_in_pieces(recorder, rows):
    x, weight = tensors(rows)
    assert_bitwise_equal(linear(x, weight), twin(x, weight, None))
    counts = [m for _, m in recorder.ran]
    assert counts[:-1] == [8] * ((rows - 1) // 8) and sum(counts) == rows
    last = {1: "few", 3: "some", 8: "many"}[counts[-1]]
    assert recorder.ran[-1] == (last, counts[-1])


def test_leading_axes_are_rows(recorder):
    x, weight = tensors(2, 3)
    y = linear(x, weight)
    assert_bitwise_equal(y, twin(x.view(6, -1), weight, None).view(2, 3, SHAPE.n))
    assert_bitwise_equal(linear(x[0, 0], weight), y[0, 0])
    assert recorder.ran == [("many", 6), ("few", 1)]


def test_another_shape_gets_the_canonical_kernel(recorder):
    x, weight = tensors(2)
    linear(x, weight[:8])
    linear(x, weight, torch.zeros(SHAPE.n).half())
    linear(x.bfloat16(), weight.bfloat16())
    assert recorder.ran == [("canonical", 2)] * 3


def strided(x):
    """The same numbers with gaps between the rows."""
    return torch.zeros(len(x), x.shape[1] + 8, dtype=x.dtype)[:, : x.shape[1]].copy_(x)


def by_columns(x):
    return x.t().contiguous().t()


def shifted(x):
    """The same numbers, two bytes beyond a multiple of 16."""
    return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("layout", [strided, by_columns, shifted], ids=lambda f: f.__name__)
def test_layout_of_x_never_chooses_the_kernel(recorder, layout, rows):
    """Kernels are proven on rows that lie close, and start at multiples of 16 bytes."""
    x, weight = tensors(rows)
    linear(x, weight)
    assert_bitwise_equal(linear(layout(x), weight), twin(x, weight, None))
    assert recorder.ran[0] == recorder.ran[1]
    given, _ = recorder.operands[1]
    assert given.is_contiguous() and given.data_ptr() % 16 == 0


def test_x_is_not_copied_without_need(recorder):
    x, weight = tensors(5)
    linear(x, weight)
    linear(x[1:3], weight)
    assert [given.data_ptr() for given, _ in recorder.operands] == [x.data_ptr(), x[1].data_ptr()]


@pytest.mark.parametrize("layout", [strided, shifted], ids=lambda f: f.__name__)
def test_layout_of_the_weight_that_is_not_proven_gets_the_canonical_kernel(recorder, layout):
    x, weight = tensors(2)
    assert_bitwise_equal(linear(x, layout(weight)), twin(x, weight, None))
    assert recorder.ran == [("canonical", 2)]


def test_nothing_to_compute(recorder):
    x, weight = tensors(2, 3)
    bias = torch.arange(SHAPE.n).half()
    assert linear(x[:, :0], weight).shape == (2, 0, SHAPE.n)
    assert linear(x, weight[:0]).shape == (2, 3, 0)
    assert_bitwise_equal(linear(x[..., :0], weight[:, :0]), torch.zeros(2, 3, SHAPE.n).half())
    assert_bitwise_equal(linear(x[..., :0], weight[:, :0], bias), bias.expand(2, 3, -1))
    assert recorder.ran == []


def test_what_does_not_fit_is_refused(recorder):
    x, weight = tensors(2)
    for args, reason in [
        ((x[:, :32], weight), "do not fit"),
        ((x, weight, torch.zeros(3).half()), "do not fit"),
        ((x.float(), weight), "the dtypes are"),
        ((x.double(), weight.double()), "expected one of"),
        ((x, by_columns(weight)), "expected 1 along K"),
    ]:
        with pytest.raises(ValueError, match=reason):
            linear(*args)
    assert recorder.ran == []


def test_install_replaces_what_was_installed(recorder):
    x, weight = tensors(2)
    kept = module.PLANS
    install({})
    linear(x, weight)
    assert recorder.ran == [("canonical", 2)] and module.PLANS is kept


def test_plan_is_made_of_known_kernels():
    known = [kernel("a"), kernel("b")]
    made = plan([1, 8], ["b", "a"], known)
    assert made == Plan((1, 8), (known[1], known[0]))
    with pytest.raises(KeyError, match="c"):
        plan([1, 8], ["a", "c"], known)
