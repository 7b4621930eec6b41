"""The CPU kernels: close to fp64, equal to their PyTorch twins, and blind to the batch.

Row counts straddle every edge of the schedule: 4 | 5 rows (in place or packed), 6 | 7 and 12 | 13
(register tiles of AVX2 and AVX-512), 192 | 193 and 384 | 385 (rows a panel is packed for).
"""

from __future__ import annotations

import pytest
import torch
from cpu_support import EPSILON, dtypes, spread

from sgl_det.kernels import cpu, reference
from sgl_det.kernels.cpu_self_test import self_test
from sgl_det.kernels.order import reduction_order, straddles
from sgl_det.testing import assert_bitwise_equal

MOST = straddles()[-1] + 1

pytestmark = pytest.mark.usefixtures("one_thread", "nan_filled_empty")


# 203 and 37 leave a rest in every block of k and of outputs; 520 crosses the K block of 256 twice.
@dtypes
@pytest.mark.parametrize("n, k", [(37, 203), (64, 520)], ids=["37x203", "64x520"])
def test_linear_is_close_to_fp64(n, k, dtype):
    x, w, bias = spread(33, k, dtype=dtype), spread(n, k, dtype=dtype), spread(n, dtype=dtype)
    exact = x.double() @ w.double().T + bias.double()
    # Rounding of the result, and of K partial sums that are no larger than the sum of magnitudes.
    bound = exact.abs() * EPSILON[dtype] + x.double().abs() @ w.double().abs().T * k * 2**-24
    assert ((cpu.linear(x, w, bias).double() - exact).abs() <= bound).all()


@dtypes
def test_linear_equals_its_twin(dtype):
    x, w, bias = spread(9, 203, dtype=dtype), spread(37, 203, dtype=dtype), spread(37, dtype=dtype)
    for rows in (1, 4, 9):
        expected = reference.linear(x[:rows], w, bias)
        assert_bitwise_equal(cpu.linear(x[:rows], w, bias), expected, f"{rows} rows")


def test_linear_equals_its_twin_with_mixed_dtypes():
    x, w, bias = spread(7, 64), spread(20, 64, dtype=torch.bfloat16), spread(20, dtype=torch.half)
    expected = reference.linear(x, w, bias, torch.bfloat16)
    assert_bitwise_equal(cpu.linear(x, w, bias, torch.bfloat16), expected)


@dtypes
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_linear_row_does_not_depend_on_its_batch(where, dtype):
    x, w = spread(MOST, 520, dtype=dtype), spread(37, 520, dtype=dtype)
    whole = cpu.linear(x, w)
    for m in straddles():
        start = {"first": 0, "middle": (MOST - m) // 2, "last": MOST - m}[where]
        rows = slice(start, start + m)
        assert_bitwise_equal(cpu.linear(x[rows], w), whole[rows], f"{m} rows")


def test_linear_does_not_depend_on_threads_or_strides():
    wide, w = spread(40, 900, dtype=torch.bfloat16), spread(37, 300, dtype=torch.bfloat16)
    x = wide[:, 100:400]
    whole = cpu.linear(x.contiguous(), w)
    torch.set_num_threads(2)
    for m in (1, 4, 5, 40):
        assert_bitwise_equal(cpu.linear(x[:m], w), whole[:m], f"{m} rows")


def test_control_a_sum_in_two_halves_differs():
    """What the tests above would see if the order followed the batch."""
    x, w = spread(8, 512), spread(37, 512)
    halves = cpu.linear(x[:, :256], w[:, :256].contiguous())
    halves += cpu.linear(x[:, 256:], w[:, 256:].contiguous())
    with pytest.raises(AssertionError, match="differ in their bits"):
        assert_bitwise_equal(halves, cpu.linear(x, w))


def test_control_pytorch_linear_depends_on_the_batch():
    x, w = spread(64, 3072), spread(256, 3072)
    whole = torch.nn.functional.linear(x, w)
    with pytest.raises(AssertionError, match="differ in their bits"):
        for m in (1, 2, 7, 33):
            assert_bitwise_equal(torch.nn.functional.linear(x[:m], w), whole[:m])


# 33 and 80 are no multiple of the 32 lanes.
@dtypes
@pytest.mark.parametrize("d", [33, 80, 128, 1024])
def test_rms_norm(d, dtype):
    x, residual, w = (spread(*s, dtype=dtype) for s in ((19, d), (19, d), (d,)))
    pair, twin = cpu.rms_norm(x, w, 1e-6, residual), reference.rms_norm(x, w, 1e-6, residual)
    for actual, expected in zip(pair, twin, strict=True):
        assert_bitwise_equal(actual, expected)
    h = x.double() + residual.double()
    exact = h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w.double()
    bound = exact.abs() * (EPSILON[dtype] + 2**-20) + 1e-6  # the last for sums that cancel
    assert ((pair[0].double() - exact).abs() <= bound).all()
    alone = cpu.rms_norm(x, w, 1e-6)
    torch.set_num_threads(2)
    for row in (0, 9, 18):
        one = cpu.rms_norm(x[row : row + 1], w, 1e-6)
        assert_bitwise_equal(one, alone[row : row + 1], f"row {row}")


def test_rms_norm_rounds_where_asked():
    x, w = spread(5, 64, dtype=torch.bfloat16), spread(64)
    first = cpu.rms_norm(x, w, 1e-6, cast_first=True)
    plain = cpu.rms_norm(x.float(), torch.ones(64), 1e-6).to(torch.bfloat16)
    assert_bitwise_equal(first, plain * w)
    y, total = cpu.rms_norm(x, w, 1e-6, x, extra=x, residual_dtype=torch.float32)
    assert y.dtype == torch.bfloat16
    assert_bitwise_equal(total, x.float() * 3)
    part = cpu.rms_norm(x.float(), w, 1e-6, var_size=32)
    scale = (x[:, :32].double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    assert (part.double() / (x.double() * scale * w.double()) - 1).abs().max() < 1e-5


@dtypes
def test_silu_and_mul(dtype):
    x = spread(7, 2 * 101, dtype=dtype)
    y, (a, b) = cpu.silu_and_mul(x), x.double().chunk(2, -1)
    exact = a * a.sigmoid() * b
    assert ((y.double() - exact).abs() <= exact.abs() * (3 * EPSILON[dtype] + 2**-21) + 1e-7).all()
    for row in range(7):
        assert_bitwise_equal(cpu.silu_and_mul(x[row : row + 1].clone()), y[row : row + 1])


@dtypes
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
def test_rotary_equals_the_eager_expression(neox, dtype):
    x, table = spread(11, 3 * 80, dtype=dtype), torch.rand(50, 64).to(dtype)
    positions = torch.randint(0, 50, (11,))
    cos, sin = (t[:, None] for t in table[positions].chunk(2, -1))
    heads = x.view(11, 3, 80)
    rotated, rest = heads[..., :64], heads[..., 64:]
    a, b = rotated.chunk(2, -1) if neox else (rotated[..., ::2], rotated[..., 1::2])
    pair = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.cat(pair, -1) if neox else torch.stack(pair, -1).flatten(-2)
    expected = torch.cat((turned, rest), -1).view_as(x)
    assert_bitwise_equal(cpu.rotary(x, positions, table, 80, neox), expected)


def test_exp_is_accurate_and_exact_at_zero():
    x = -torch.rand(4096) * 90
    twin = reference.exp(x)
    exact = x.double().exp()
    assert ((twin.double() / exact - 1).abs()[x > -87] < 2**-22).all()
    assert (twin[x < -87] == 0).all()
    assert_bitwise_equal(reference.exp(torch.zeros(1)), torch.ones(1))


def test_self_test_proves_and_refuses(monkeypatch):
    heads = (4, 2, 32, 32, torch.bfloat16)
    weights = [spread(70, 1000, dtype=torch.bfloat16)]
    assert self_test(weights, heads, 320)["linear"] == ["N=70 K=1000 bfloat16"]
    ours = cpu.linear

    def follows_the_batch(x, w, bias=None, out_dtype=None):
        if len(x) < 13:
            return ours(x, w, bias, out_dtype)
        return torch.nn.functional.linear(x.float(), w.float()).to(out_dtype or x.dtype)

    monkeypatch.setattr(cpu, "linear", follows_the_batch)
    with pytest.raises(RuntimeError, match="failed their self-test.*linear N=70 K=1000"):
        self_test(weights, heads, 320)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: cpu.linear(torch.ones(2, 3), torch.ones(4, 5)), "3 long .* expected 5"),
        (lambda: cpu.linear(torch.ones(2, 3).double(), torch.ones(4, 3)), "float64"),
        (lambda: cpu.linear(torch.ones(2, 3), torch.ones(3, 4).T), "strides"),
        (lambda: cpu.linear(torch.ones(2, 3), torch.ones(4, 3), torch.ones(1)), r"expected \(4,\)"),
    ],
    ids=["shape", "dtype", "strides", "bias"],
)
def test_refusals_are_one_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_orders_have_no_batch():
    assert reduction_order("linear").split is None
    with pytest.raises(ValueError, match="no reduction order"):
        reduction_order("linear", arch="sm_90")
