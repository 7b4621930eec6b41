"""The attention kernels compile for every GPU generation that is named, and fit there."""

from __future__ import annotations

import pytest
import torch

from sgl_det.kernels import attention, attention_decode, flashinfer_order
from sgl_det.kernels import attention_order as order

from .compile_targets import ARCHS, SHARED_KIB, Case

HEADS, GROUP = 8, 4
PLAIN = {"WINDOW": False, "CAP": False, "SINKS": False, "LSE": False}
ALL = dict.fromkeys(PLAIN, True)
_STRIDES = [f"stride_{x}" for x in ("qt", "qh", "ks", "kg", "vs", "vg", "ot", "oh")]
_OPTIONAL = {
    "SINKS": ("sinks_ptr", "*fp32"),
    "LSE": ("lse_ptr", "*fp32"),
    "MOVED": ("moved_ptr", "*i32"),
}


def case(name, kernel, d, arch, constants, pointers, numbers, warps, stages) -> Case:
    """A compilation for bf16; an optional argument is there where its constant says so."""
    given = {p: t for c, (p, t) in _OPTIONAL.items() if constants.get(c)}
    absent = {p: None for c, (p, _) in _OPTIONAL.items() if c in constants and not constants[c]}
    return Case(
        name=f"{name}-{d}{'-all' * constants['WINDOW']}",
        kernel=kernel,
        signature={p: "*bf16" for p in ("q_ptr", "k_ptr", "v_ptr", "o_ptr")}
        | dict.fromkeys(("rows_ptr", "lengths_ptr"), "*i64")
        | {"table_ptr": "*i32", "scale": "fp32", "cap": "fp32"}
        | dict.fromkeys((*_STRIDES, "stride_table", "window", *numbers), "i32")
        | pointers
        | given,
        constexprs=absent
        | {"H": HEADS, "D": d, "BLOCK_D": 1 << (d - 1).bit_length()}
        | {"BLOCK_S": order.tile(d, arch), "SPLIT": order.SPLIT}
        | constants,
        num_warps=warps,
        num_stages=stages,
        options={"enable_fp_fusion": False},
    )


def extend(d, options, arch=90, **more) -> Case:
    small = {"plain": not options["WINDOW"], "shared_kib": SHARED_KIB[arch]}
    launch = attention.launch_for(4096, d, order.tile(d, arch), **small)
    constants = {**options, "MOVED": options["WINDOW"], "GROUP": GROUP, "BLOCK_M": launch.rows}
    constants |= {"RECIPROCAL": False} | more
    shape = (launch.warps, launch.stages)
    kernel = attention._attention_kernel
    return case("extend", kernel, d, arch, constants, {"starts_ptr": "*i64"}, (), *shape)


def decode(d, options, arch=90, warps=4, stages=3, **more) -> Case:
    constants = {
        **options,
        "MOVED": options["WINDOW"],
        "GROUP": GROUP,
        "BLOCK_M": 16,
        "PARTS": True,
        "LIST": True,
        "ENDS": False,
        "RECIPROCAL": False,
        **more,
    }
    parts = dict.fromkeys(("parts_ptr", "tops_ptr", "totals_ptr"), "*fp32")
    numbers = ("stride_parts", "shared")
    kernel = attention_decode._decode_attention_kernel
    shape = (warps, stages)
    return case("decode", kernel, d, arch, constants, parts, numbers, *shape)


CASES = [make(d, PLAIN) for d in order.HEAD_DIMS for make in (extend, decode)]
CASES += [make(d, ALL) for d in (128, 256) for make in (extend, decode)]
CASES += [decode(d, PLAIN, stages=5) for d in (64, 128)]
OTHERS = [a for a in ARCHS if a != 90]
ELSEWHERE = [(extend(d, PLAIN, a), a) for d in (128, 256) for a in OTHERS]
ELSEWHERE += [(decode(d, ALL, a), a) for d in (128, 256) for a in OTHERS]
ELSEWHERE += [(decode(128, PLAIN, 100, stages=5), 100)]
FLASHINFER = {"BLOCK_S": flashinfer_order.KV_TILE, "SPLIT": flashinfer_order.SPLIT}
FLASHINFER["RECIPROCAL"] = True
CASES += [decode(128, PLAIN, warps=2, stages=s, **FLASHINFER) for s in (4, 5)]
CASES += [extend(d, PLAIN, **FLASHINFER) for d in (64, 128)]
ELSEWHERE += [(decode(128, PLAIN, a, **FLASHINFER), a) for a in OTHERS]
# Bytes of registers that may be parked in memory, where tiles or heads are large.
PARKED = {256: 64, 128: 168}


def name(value):
    return value.name if isinstance(value, Case) else f"sm_{value}"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_compiles_for_hopper_without_spills(case):
    built = case.compile_for(90)
    assert built.shared <= SHARED_KIB[90] * 1024
    assert (built.spills or 0) <= PARKED.get(case.constexprs["D"], 0)


@pytest.mark.parametrize(("case", "arch"), ELSEWHERE, ids=name)
def test_compiles_for_other_gpus(case, arch):
    assert case.compile_for(arch).shared <= SHARED_KIB[arch] * 1024


def test_heads_and_dtypes_that_are_held():
    for d in order.HEAD_DIMS:
        assert order.reduction_order(d=d, dtype=torch.bfloat16, arch=90).split == order.SPLIT
