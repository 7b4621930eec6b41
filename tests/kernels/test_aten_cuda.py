"""PyTorch's products and reductions under our overrides: near its own, of one order, and undone."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from cpu_support import DTYPES, EPSILON, dtypes
from torch.nn.functional import linear

from sgl_det.kernels import aten_cuda, aten_reductions, cublas
from sgl_det.kernels import bmm as bmm_module
from sgl_det.kernels.aten_cuda import Overrides
from sgl_det.kernels.matmul import matmul
from sgl_det.testing import assert_bitwise_equal

from .aten_cases import EMPTY, PRODUCTS, REDUCTIONS, K, L, N, Tensors
from .interpreter import ACTIVE, MARKS, pick

pytestmark = MARKS
KEY = "CPU" if ACTIVE else "CUDA"
# Of types that our kernels do not hold.
THEIRS = {
    "fp64": lambda t: t.a.double() @ t.b.double(),
    "fp64 softmax": lambda t: t.a.softmax(-1, dtype=torch.float64),
    "fp64 mean": lambda t: t.a.mean(-1, dtype=torch.float64),
    "fp64 addmm": lambda t: torch.addmm(t.c.double(), t.a.double(), t.b.double(), alpha=2),
    "fp64 bmm": lambda t: torch.bmm(t.A.double(), t.B.double()),
    "fp64 baddbmm": lambda t: torch.baddbmm(t.C.double(), t.A.double(), t.B.double(), beta=2),
    "fp64 mv": lambda t: torch.mv(t.a.double(), t.v.double()),
    "fp64 addmv": lambda t: torch.addmv(t.rows.double(), t.a.double(), t.v.double(), beta=2),
    "complex": lambda t: t.a.to(torch.complex64) @ t.b.to(torch.complex64),
}
if ACTIVE:  # cuBLAS has no products of whole numbers
    THEIRS["int32"] = lambda t: t.a.int() @ t.b.int()
ALL = PRODUCTS | REDUCTIONS | EMPTY | THEIRS


@contextmanager
def ours():
    overrides = Overrides(KEY)
    try:
        yield
    finally:
        overrides.undo()


def of(functions):
    return pytest.mark.parametrize("function", functions.values(), ids=functions)


@of(PRODUCTS | REDUCTIONS | EMPTY)
@dtypes
def test_near_pytorch(function, dtype):
    tensors = Tensors(dtype)
    theirs, exact = function(tensors), function(Tensors64(tensors))
    with ours():
        y = function(tensors)
    assert (y.shape, y.dtype, y.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
    # Up to three roundings to the dtype, each of a number not much above the largest result, and
    # K roundings to fp32 on the way there.
    scale = exact.abs().max().item() if exact.numel() else 0.0
    bound = (8 * EPSILON[dtype] + 2 * K**0.5 * EPSILON[torch.float32]) * scale + 2**-16
    assert ((y.double() - exact).abs() <= bound).all()


class Tensors64(Tensors):
    """The same operands in fp64: PyTorch's results for them count as exact."""

    def __init__(self, tensors):
        self.__dict__.update(vars(tensors))
        for name, value in vars(tensors).items():
            if isinstance(value, torch.Tensor):
                setattr(self, name, value.double())
        self.dtype = torch.float64


@of(THEIRS)
def test_other_types_go_to_pytorch(function):
    """To its kernel, not to its bits: cuBLAS and cuBLASLt may differ."""
    tensors = Tensors(torch.float32)
    expected = function(tensors)
    with ours():
        y = function(tensors)
    assert (y.shape, y.dtype) == (expected.shape, expected.dtype)
    assert (y - expected).abs().max() < 1e-3


class Seen(Exception):
    """Our kernel was asked."""


@pytest.fixture
def seen(monkeypatch):
    """Our kernels say that they were asked, instead of an answer."""

    def ask(*args, **kwargs):
        raise Seen

    for module, names in (
        (aten_cuda, ["linear", "matmul"]),
        (bmm_module, ["bmm"]),
        (aten_reductions, ["softmax", "log_softmax", "mean"]),
    ):
        for name in names:
            monkeypatch.setattr(module, name, ask)


@of(PRODUCTS | REDUCTIONS)
def test_every_one_is_ours(seen, function):
    tensors = Tensors(torch.bfloat16)
    with ours(), pytest.raises(Seen):
        function(tensors)
    function(tensors)


@of(THEIRS)
def test_control_those_of_other_types_are_not(seen, function):
    with ours():
        function(Tensors(torch.bfloat16))


def test_a_product_in_fp32_is_not_rounded():
    """torch.mm(..., out_dtype): PyTorch has it on GPUs alone, so its method is called here."""
    t = Tensors(torch.bfloat16)
    overrides = Overrides(KEY)
    try:
        y = overrides._mm_dtype(t.a, t.b, torch.float32)
        assert overrides._mm_dtype(t.a[:0], t.b, torch.float32).shape == (0, N)
        rounded = t.a @ t.b
    finally:
        overrides.undo()
    assert y.dtype == torch.float32
    assert_bitwise_equal(y.bfloat16(), rounded)
    with pytest.raises(AssertionError, match="differ"):
        assert_bitwise_equal(y, rounded.float())


BY_ROW = {
    "mm": lambda x, t: x @ t.b,
    "linear": lambda x, t: linear(x, t.w, t.bias),
    "addmm": lambda x, t: torch.addmm(t.bias, x, t.b, beta=0.5),
    "mv": lambda x, t: torch.mv(x, t.v),
    "bmm": lambda x, t: torch.bmm(x.expand(L, -1, -1), t.B).transpose(0, 1),
    "softmax": lambda x, t: x.softmax(-1),
    "log_softmax": lambda x, t: x.log_softmax(-1),
    "mean": lambda x, t: x.mean(-1),
}


@of(BY_ROW)
@pytest.mark.parametrize("dtype", pick(gpu=DTYPES, interpreter=[torch.float32]), ids=str)
def test_row_does_not_depend_on_its_batch(function, dtype):
    t = Tensors(dtype)
    x = t.A.reshape(-1, K)
    with ours():
        whole = function(x, t)
        for count in (1, 2, len(x) - 1):
            for where in (0, (len(x) - count) // 2, len(x) - count):
                rows = slice(where, where + count)
                y = function(x[rows], t)
                assert_bitwise_equal(y, whole[rows], f"{count} from row {where}")


def test_products_of_one_row_are_one_value():
    """Whichever operator a model asks: the order is that of the linear layer."""
    t = Tensors(torch.float32)
    expected = matmul(t.a, t.w)
    with ours():
        assert_bitwise_equal(t.a @ t.b, expected, "mm")
        assert_bitwise_equal(torch.bmm(t.a[None], t.b[None])[0], expected, "bmm")
        assert_bitwise_equal(torch.einsum("mk,kn->mn", t.a, t.b), expected, "einsum")
        assert_bitwise_equal(torch.mv(t.a, t.w[3]), expected[:, 3], "mv")
        assert_bitwise_equal(torch.addmm(t.bias, t.a, t.b, beta=0), expected, "addmm")


def flags():
    matmul = torch.backends.cuda.matmul
    names = [f"{f}{end}" for f in cublas._REDUCTIONS for end in ("", "_split_k")]
    return torch.backends.cuda.preferred_blas_library(), [getattr(matmul, f) for f in names]


FORBIDDEN = [False] * 4


def kernels():
    """Which keys of PyTorch's dispatcher have a kernel of their own."""
    names = (*aten_cuda._NAMES, *aten_reductions.NAMES, *aten_cuda._OUT, *aten_cuda._IN_PLACE)
    return [torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{n}", KEY) for n in names]


def test_undo_leaves_nothing():
    tensors, before = Tensors(torch.float32), (flags(), kernels())
    assert before[0][1] != FORBIDDEN, "an earlier test has left something"
    expected = [function(tensors) for function in ALL.values()]
    overrides = Overrides(KEY)
    assert flags()[1] == FORBIDDEN
    overrides.undo()
    assert (flags(), kernels()) == before
    for name, function, y in zip(ALL, ALL.values(), expected, strict=True):
        assert_bitwise_equal(function(tensors), y, name)


def test_undo_twice_is_undo_once(seen):
    before, first = flags(), Overrides(KEY)
    first.undo()
    second = Overrides(KEY)
    first.undo()
    with pytest.raises(Seen):
        PRODUCTS["mm"](Tensors(torch.float32))
    assert flags()[1] == FORBIDDEN
    second.undo()
    PRODUCTS["mm"](Tensors(torch.float32))
    assert flags() == before


def test_a_failure_inside_leaves_the_overrides_on(seen):
    t = Tensors(torch.float32)
    with ours():
        for _ in range(2):
            with pytest.raises(Seen):
                t.a @ t.b
    t.a @ t.b
