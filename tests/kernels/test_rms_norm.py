"""The norm's Triton kernels: equal to their twin, near fp64, and independent of the batch."""

from __future__ import annotations

import pytest
import torch
from cpu_support import EPSILON, dtypes, spread

from sgl_det.kernels import reference_gpu, rms_norm
from sgl_det.kernels.order import ReductionOrder
from sgl_det.testing import assert_bitwise_equal

from .interpreter import DEVICE, MARKS, order_dtypes, pick

pytestmark = [*MARKS, pytest.mark.usefixtures("nan_filled_empty")]
EPS = 1e-6
# 2048 is the widest tile: sizes of one tile, of part of one, of several, and with a ragged last.
HIDDEN = pick(gpu=[64, 128, 1024, 2048, 2880, 4096, 5120, 8192, 16384], interpreter=[100, 2100])
# For what compiles a kernel of its own in each case.
FEW = pick(gpu=[128, 2880, 4096, 5120], interpreter=HIDDEN)
# A program holds 2048 // D rows of a short norm: 1 | 2 | 16 | 32 and their neighbours.
TOKENS = pick(gpu=[1, 2, 3, 7, 8, 15, 17, 33, 300], interpreter=[1, 17])
MOST = max(TOKENS)
HEADS = pick(gpu=[(32, 8, 128), (16, 2, 256), (12, 12, 64), (4, 1, 80)], interpreter=[(3, 1, 64)])
hidden = pytest.mark.parametrize("d", HIDDEN, ids=lambda d: f"D{d}")
few_hidden = pytest.mark.parametrize("d", FEW, ids=lambda d: f"D{d}")


def tensors(d, dtype, rows=MOST):
    torch.manual_seed(d)
    x, residual = spread(rows, d, dtype=dtype), spread(rows, d, dtype=dtype)
    return [z.to(DEVICE) for z in (x, residual, torch.randn(d).to(dtype))]


def added(x, residual, weight, **options):
    """`fused_add_rms_norm` on copies -> (y, residual)."""
    x, residual = x.clone(), residual.clone()
    rms_norm.fused_add_rms_norm(x, residual, weight, EPS, **options)
    return x, residual


@hidden
@dtypes
def test_equals_its_twin(d, dtype, gemma=False):
    x, residual, weight = tensors(d, dtype, 5)
    twin, _ = reference_gpu.rms_norm(x, weight, EPS, gemma=gemma)
    assert_bitwise_equal(rms_norm.rms_norm(x, weight, EPS, gemma=gemma), twin, "rms_norm")
    twins = reference_gpu.rms_norm(x, weight, EPS, residual, gemma=gemma)
    fused = added(x, residual, weight, gemma=gemma)
    for name, ours, twin in zip(("y", "residual"), fused, twins, strict=True):
        assert_bitwise_equal(ours, twin, name)


@few_hidden
def test_gemma_multiplies_by_one_more(d):
    test_equals_its_twin(d, torch.bfloat16, gemma=True)


@hidden
@dtypes
def test_near_fp64(d, dtype):
    x, residual, weight = tensors(d, dtype, 5)
    h = x.double() + residual.double()
    exact = h / (h.square().mean(1, keepdim=True) + EPS).sqrt() * weight.double()
    y, new = added(x, residual, weight)
    # One rounding to dtype; the rest is fp32, 11 roundings down the tree and a few products.
    relative = EPSILON[dtype] + 2**-19
    assert ((y.double() - exact).abs() <= relative * exact.abs() + 1e-7).all()
    assert_bitwise_equal(new, (x.float() + residual.float()).to(dtype))


@hidden
@order_dtypes
@pytest.mark.parametrize("count", TOKENS[:-1], ids=lambda t: f"T{t}")
def test_row_does_not_depend_on_its_batch(d, dtype, count):
    x, residual, weight = tensors(d, dtype)
    whole, whole_fused = rms_norm.rms_norm(x, weight, EPS), added(x, residual, weight)
    for where in (0, (MOST - count) // 2, MOST - count):
        part = slice(where, where + count)
        assert_bitwise_equal(rms_norm.rms_norm(x[part], weight, EPS), whole[part], f"row {where}")
        fused = added(x[part], residual[part], weight)
        for ours, all_rows in zip(fused, whole_fused, strict=True):
            assert_bitwise_equal(ours, all_rows[part], f"fused, row {where}")


@hidden
def test_neighbours_do_not_show(d):
    x, _, weight = tensors(d, torch.float32, 9)
    noise = torch.full_like(x, float("nan"))
    noise[4] = x[4]
    y = rms_norm.rms_norm(noise, weight, EPS)[4]
    assert_bitwise_equal(y, rms_norm.rms_norm(x, weight, EPS)[4])


@few_hidden
@dtypes
def test_strides_and_alignment_do_not_show(d, dtype):
    """They decide how wide a load may be, so also which thread holds which element."""
    x, residual, weight = tensors(d, dtype, 5)
    wide = torch.zeros(5, d + 17, dtype=dtype, device=DEVICE)
    shifted = wide[:, 1 : d + 1].copy_(x)
    assert_bitwise_equal(rms_norm.rms_norm(shifted, weight, EPS), rms_norm.rms_norm(x, weight, EPS))
    packed = wide[:, 3 : d + 3].copy_(x)
    expected, _ = added(x, residual, weight)
    rms_norm.fused_add_rms_norm(packed, residual, weight, EPS)
    assert_bitwise_equal(packed, expected)
    assert_bitwise_equal(wide[:, d + 3 :], torch.zeros_like(wide[:, d + 3 :]), "past the row")


@few_hidden
@pytest.mark.parametrize("warps", pick(gpu=[2, 4, 8, 16], interpreter=[4]))
def test_warps_and_rows_a_program_do_not_show(d, warps, monkeypatch):
    """Why neither is in the order: every step of the tree adds two numbers, in any layout."""
    x, residual, weight = tensors(d, torch.float32, 9)
    expected = added(x, residual, weight)
    monkeypatch.setattr(rms_norm, "warps", lambda order: warps)
    for rows in (1, 4):
        monkeypatch.setattr(rms_norm, "rows_of", lambda *_, rows=rows: rows)
        for ours, before in zip(added(x, residual, weight), expected, strict=True):
            assert_bitwise_equal(ours, before, f"{warps} warps, {rows} rows")


@order_dtypes
@pytest.mark.parametrize("heads, groups, d", HEADS, ids=str)
@pytest.mark.parametrize("count", TOKENS, ids=lambda t: f"T{t}")
def test_heads_in_a_packed_row(dtype, heads, groups, d, count):
    torch.manual_seed(0)
    qkv = spread(MOST, (heads + 2 * groups) * d, dtype=dtype).to(DEVICE)
    q_weight, k_weight = torch.randn(2, d).to(dtype).to(DEVICE)
    packed = qkv[MOST - count :].clone()
    q, k, v = packed.split((heads * d, groups * d, groups * d), dim=1)
    q, k = q.view(count, heads, d), k.view(count, groups, d)
    twins = [
        reference_gpu.rms_norm(z.reshape(-1, d), w, EPS)[0].view(z.shape)
        for z, w in ((q, q_weight), (k, k_weight))
    ]
    rms_norm.rms_norm_heads(q, k, q_weight, k_weight, EPS)
    assert_bitwise_equal(q, twins[0], "q")
    assert_bitwise_equal(k, twins[1], "k")
    assert_bitwise_equal(v, qkv[MOST - count :, -groups * d :], "v is left alone")


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_rows_a_program_of_heads_do_not_show(rows, monkeypatch):
    q, k = (spread(5, n * 128, dtype=torch.float32).to(DEVICE).view(5, n, 128) for n in (4, 2))
    weight = torch.ones(128, device=DEVICE)
    found = []
    for _ in range(2):
        pair = q.clone(), k.clone()
        rms_norm.rms_norm_heads(*pair, weight, weight, EPS)
        found.append(pair)
        monkeypatch.setattr(rms_norm, "rows_of_heads", lambda *_: rows)
    for one, other in zip(*found, strict=True):
        assert_bitwise_equal(one, other, f"{rows} rows")


def test_few_rows_spread_over_the_gpu():
    order = rms_norm.reduction_order(d=128, dtype=torch.bfloat16)
    spread_over = [rms_norm.rows_of_heads(order, n) for n in (1, 40, 2560, 10_240, 1 << 20)]
    assert spread_over == [1, 1, 2, 8, 16]
    wide = rms_norm.reduction_order(d=1024, dtype=torch.bfloat16)
    assert [rms_norm.rows_of(wide, 1024, n) for n in (1, 4095, 4096)] == [1, 1, 2]
    assert rms_norm.rows_of(wide, 4096, 8192) == 1


@pytest.mark.parametrize("d", [d for d in FEW if d > 1000], ids=lambda d: f"D{d}")
def test_control_an_order_that_sees_the_batch_shows(d, monkeypatch):
    x, _, weight = tensors(d, torch.float32)
    alone = [rms_norm.rms_norm(x[i : i + 1], weight, EPS) for i in range(min(MOST, 40))]

    def narrower(*, d, dtype, arch=None):
        return ReductionOrder(axis="D", block=256, lanes=256)

    # As a kernel would that takes narrower tiles when it has many rows.
    monkeypatch.setattr(rms_norm, "reduction_order", narrower)
    whole = rms_norm.rms_norm(x, weight, EPS)
    with pytest.raises(AssertionError, match="differ"):
        assert_bitwise_equal(whole[: len(alone)], torch.cat(alone))


def test_no_rows():
    x, residual, weight = tensors(64, torch.float32, 0)
    assert rms_norm.rms_norm(x, weight, EPS).shape == (0, 64)
    rms_norm.fused_add_rms_norm(x, residual, weight, EPS)
    rms_norm.rms_norm_heads(x.view(0, 1, 64), x.view(0, 1, 64), weight, weight, EPS)


def test_what_does_not_fit_is_refused():
    x, residual, weight = tensors(64, torch.float32, 4)
    for args, reason in [
        ((x.double(), weight), "is torch.float64"),
        ((x, weight[:32]), r"weight is \(32,\) for rows of 64"),
        ((x.t(), weight[:4]), "stride 1 along D"),
        ((x[0], weight), r"expected \[\.\.\., D\]"),
        ((x.new_zeros(1, 16400), x.new_zeros(16400)), "1 to 16384"),
    ]:
        with pytest.raises(ValueError, match=reason):
            rms_norm.rms_norm(*args, EPS)
    with pytest.raises(ValueError, match="expected one shape"):
        rms_norm.fused_add_rms_norm(x, residual[:3], weight, EPS)
    with pytest.raises(ValueError, match=r"expected \[T, H, D\]"):
        rms_norm.rms_norm_heads(x, x, weight, weight, EPS)
