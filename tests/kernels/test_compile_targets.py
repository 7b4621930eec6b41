"""Every Triton kernel compiles for every GPU generation that is named, and fits it.

Another kernel takes part by a function that yields its `Case`s, named in CASES.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from sgl_det.kernels import log_softmax, rms_norm, row_sum

from .compile_targets import ARCHS, SHARED_KIB, Case

NO_FMA = {"enable_fp_fusion": False}


def norms():
    """The widest row, one that is no power of two, a model's, and rows that share a program."""
    pointers = ("x_ptr", "residual_ptr", "w_ptr", "y_ptr")
    strides = {f"{x}_stride_t": "i32" for x in ("x", "residual", "y")}
    for d, dtype, fused in (
        (16384, "bf16", True),
        (5120, "fp32", True),
        (4096, "bf16", False),
        (128, "bf16", False),
    ):
        order = rms_norm.reduction_order(d=d, dtype=row_sum.DTYPES[0])
        yield Case(
            name=f"{'fused_add_' * fused}rms_norm-D{d}-{dtype}",
            kernel=rms_norm._rms_norm_kernel,
            signature={p: f"*{dtype}" for p in pointers} | strides | {"T": "i32", "eps": "fp32"},
            constexprs={
                "D": d,
                "BLOCK_D": order.block,
                "BLOCK_T": row_sum.rows_a_program(order) if d <= order.block else 1,
                "FUSED_ADD": fused,
                "GEMMA": False,
            },
            num_warps=row_sum.warps(order),
            options=NO_FMA,
        )


def head_norms():
    pointers = ("q_ptr", "k_ptr", "q_w_ptr", "k_w_ptr")
    strides = {f"{x}_stride_{axis}": "i32" for x in "qk" for axis in "th"}
    order = rms_norm.reduction_order(d=128, dtype=row_sum.DTYPES[0])
    tile = {"BLOCK_D": order.block, "BLOCK_R": row_sum.rows_a_program(order), "GEMMA": False}
    yield Case(
        name="rms_norm_heads-D128-bf16",
        kernel=rms_norm._rms_norm_heads_kernel,
        signature={p: "*bf16" for p in pointers} | strides | {"T": "i32", "eps": "fp32"},
        constexprs={"H": 32, "G": 8, "D": 128} | tile,
        num_warps=row_sum.warps(order),
        options=NO_FMA,
    )


def vocabulary_rows():
    """Over a vocabulary of 38 splits, in the dtypes of logits."""
    same = {"num_warps": 8, "options": NO_FMA}
    tile = {"TILES": 2, "LANES": 2048}
    for dtype in ("bf16", "fp32"):
        x = {"x_ptr": f"*{dtype}", "x_stride_n": "i32", "V": "i32"}
        splits = {"max_ptr": "*fp32", "sum_ptr": "*fp32", "S": "i32"}
        yield Case(
            name=f"row_sum-{dtype}",
            kernel=row_sum._row_sum_kernel,
            signature=x | {"y_ptr": "*fp32", "N": "i32", "divisor": "fp32"},
            constexprs=tile | {"SPLITS": 38, "BLOCK_N": 1, "DIVIDE": False},
            **same,
        )
        yield Case(
            name=f"softmax_splits-{dtype}",
            kernel=log_softmax._split_kernel,
            signature=x | splits,
            constexprs=tile,
            **same,
        )
        yield Case(
            name=f"log_softmax-{dtype}",
            kernel=log_softmax._normalize_kernel,
            signature=x | splits | {"y_ptr": "*fp32", "y_stride_n": "i32"},
            constexprs=tile | {"BLOCK_S": 64, "LOG": True},
            **same,
        )


CASES = [*norms(), *head_norms(), *vocabulary_rows()]
# Sums that are made of additions alone. The logarithm of CUDA's library has FMAs of its own.
WITHOUT_FMA = [case for case in CASES if case.options == NO_FMA and "log" not in case.name]


def name(case):
    return case.name


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: f"sm_{arch}")
@pytest.mark.parametrize("case", CASES, ids=name)
def test_compiles_and_fits(case, arch):
    built = case.compile_for(arch)
    assert built.shared <= SHARED_KIB[arch] * 1024
    if arch == 90:
        assert not built.spills


@pytest.mark.parametrize("case", WITHOUT_FMA, ids=name)
def test_no_sum_is_fused(case):
    """A fused sum would depend on which of its elements share a thread, so on the layout."""
    assert not re.search(r"\b(fma|mad)\.\S*f32", case.compile_for(90).ptx)


@pytest.mark.parametrize("case", [*norms(), *head_norms(), *vocabulary_rows()], ids=name)
def test_rows_are_read_16_bytes_at_a_time(case):
    assert re.search(r"ld\.global\S*\.v4\.b32", case.compile_for(90).ptx)


def test_control_a_tile_that_does_not_fit_is_seen():
    """256 fp32 numbers a thread are more than its registers hold."""
    case = next(norms())
    tile = case.constexprs | {"D": 8192, "BLOCK_D": 8192, "FUSED_ADD": False}
    built = replace(case, constexprs=tile, num_warps=1).compile_for(90)
    assert built.spills is None or built.spills > 0


def test_control_a_fused_sum_is_seen():
    case = replace(next(norms()), options={})
    assert re.search(r"\bfma\.\S*f32", case.compile_for(90).ptx)
