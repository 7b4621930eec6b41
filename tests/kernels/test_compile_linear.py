"""The matrix products compile for every GPU generation that is named, and fit where offered.

Every tile is compiled for sm_90; for the others only those that meet most of the compiler.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sgl_det.kernels import bmm, linear_candidates, matmul, matmul_tma
from sgl_det.kernels.linear_candidates import Shape, candidates
from sgl_det.kernels.matmul import CANONICAL, Tile

from .compile_targets import ARCHS, SHARED_KIB, Case

TILES = [*(t for *_, t in linear_candidates._SMALL), linear_candidates._LARGE]
TMA = (*matmul_tma.TILES, *matmul_tma.NARROW)
SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
# The compiler needs a little beyond the operands in flight: barriers, and a tile of the bias.
SLACK = 1024
# ptxas may park one value that no loop reads, to fit more programs on a multiprocessor.
PARKED = 8


def linear(tile: Tile, dtype: str = "bf16", *, bias: bool = False, even: bool = True) -> Case:
    pointers = ("x_ptr", "w_ptr", "y_ptr", *(("bias_ptr",) if bias else ()))
    numbers = ("M", "N", "K", "stride_xm", "stride_wn", "stride_ym")
    return Case(
        name=f"{tile.name}-{dtype}{'-bias' * bias}{'' if even else '-oddK'}",
        kernel=matmul._matmul_kernel,
        signature={p: f"*{dtype}" for p in pointers} | dict.fromkeys(numbers, "i32"),
        constexprs={
            **({} if bias else {"bias_ptr": None}),
            "BLOCK_M": tile.m,
            "BLOCK_N": tile.n,
            "BLOCK_K": tile.k,
            "GROUP_M": tile.group,
            "EVEN_K": even,
            "HAS_BIAS": bias,
            "PRECISION": "ieee" if dtype == "fp32" else None,
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def tma(tile: Tile, *, bias: bool = False) -> Case:
    tiles = {"x": (tile.m, tile.k), "w": (tile.n, tile.k), "y": (tile.m, tile.n)}
    descriptors = {f"{t}_desc": f"tensordesc<bf16[{a},{b}]>" for t, (a, b) in tiles.items()}
    return Case(
        name=f"{tile.name}-tma{'-bias' * bias}",
        kernel=matmul_tma._matmul_tma_kernel,
        signature=descriptors
        | dict.fromkeys("MNK", "i32")
        | ({"bias_ptr": "*bf16"} if bias else {}),
        constexprs={
            **({} if bias else {"bias_ptr": None}),
            "BLOCK_M": tile.m,
            "BLOCK_N": tile.n,
            "BLOCK_K": tile.k,
            "GROUP_M": tile.group,
            "PROGRAMS": 132,
            "HAS_BIAS": bias,
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def batched(dtype: str) -> Case:
    tile = CANONICAL[SIZES[dtype]]
    strides = [f"stride_{t}" for t in ("al", "am", "ak", "bl", "bk", "bn")]
    return Case(
        name=f"bmm-{dtype}",
        kernel=bmm._bmm_kernel,
        signature={f"{t}_ptr": f"*{dtype}" for t in "aby"}
        | dict.fromkeys(("M", "N", "K", *strides), "i32"),
        constexprs={
            "BLOCK_M": tile.m,
            "BLOCK_N": tile.n,
            "BLOCK_K": tile.k,
            "PRECISION": "ieee" if dtype == "fp32" else None,
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def canonical():
    for dtype, size in SIZES.items():
        for bias in (False, True):
            yield linear(CANONICAL[size], dtype, bias=bias, even=not bias), size


# What is compiled for the GPUs beside sm_90.
EVERYWHERE = [
    linear(TILES[0]),
    linear(linear_candidates._LARGE),
    linear(CANONICAL[2], "fp16", bias=True, even=False),
    linear(CANONICAL[4], "fp32"),
    batched("bf16"),
]
ELSEWHERE = [(case, arch) for case in EVERYWHERE for arch in ARCHS if arch != 90]


def name(value):
    return value.name if isinstance(value, (Case, Tile)) else f"sm_{value}"


@pytest.mark.parametrize("tile", TILES, ids=name)
def test_tile_needs_what_it_says(tile):
    built = linear(tile).compile_for(90)
    assert built.shared <= tile.shared_bytes(2) + SLACK
    assert built.spills is None or built.spills <= PARKED


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("tile", TMA, ids=name)
def test_tma_tile_needs_what_it_says(tile, bias):
    built = tma(tile, bias=bias).compile_for(90)
    assert built.shared <= matmul_tma.shared_bytes(tile) + SLACK
    assert not built.spills
    # Not the slow path by which a descriptor is read with ordinary loads.
    assert "cp.async.bulk.tensor" in built.ptx and "wgmma" in built.ptx


@pytest.mark.parametrize("arch", [100, 120], ids=lambda arch: f"sm_{arch}")
def test_tma_compiles_for_later_gpus(arch):
    smallest = min(TMA, key=matmul_tma.shared_bytes)
    built = tma(smallest).compile_for(arch)
    assert built.shared <= matmul_tma.shared_bytes(smallest) + SLACK


@pytest.mark.parametrize("case, size", canonical(), ids=name)
def test_canonical_tile_needs_what_it_says(case, size):
    built = case.compile_for(90)
    assert built.shared <= CANONICAL[size].shared_bytes(size) + SLACK
    assert not built.spills


@pytest.mark.parametrize("tile", linear_candidates._FP32, ids=name)
def test_fp32_products_are_fp32(tile):
    built = linear(tile, "fp32").compile_for(90)
    assert "fma.rn.f32" in built.ptx and "tf32" not in built.ptx
    assert built.shared <= tile.shared_bytes(4) + SLACK and not built.spills


def test_control_tf32_shows():
    case = linear(CANONICAL[4], "fp32")
    tf32 = replace(case, constexprs=case.constexprs | {"PRECISION": "tf32"})
    assert "tf32" in tf32.compile_for(90).ptx


@pytest.mark.parametrize("dtype", SIZES)
def test_batched_product_compiles(dtype):
    built = batched(dtype).compile_for(90)
    assert not built.spills and "tf32" not in built.ptx


@pytest.mark.parametrize("case, arch", ELSEWHERE, ids=name)
def test_compiles_for_other_gpus(case, arch):
    assert case.compile_for(arch).shared <= SHARED_KIB[arch] * 1024


@pytest.fixture
def gpu(monkeypatch):
    """Say which GPU is there."""

    def be(arch):
        memory = SimpleNamespace(shared_memory_per_block_optin=SHARED_KIB[arch] * 1024)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: divmod(arch, 10))
        monkeypatch.setattr(linear_candidates.cublaslt, "algorithms", lambda *shape: ())

    return be


def offered(dtype=torch.bfloat16, n=4096, k=4096):
    return {c.name: c for c in candidates(Shape(n=n, k=k, dtype=dtype))}


# The tiles by the names of their candidates, with the shared memory of each.
NEEDS = {t.name: t.shared_bytes(2) for t in (*TILES, CANONICAL[2])}
NEEDS |= {t.name.replace("triton", "triton tma"): matmul_tma.shared_bytes(t) for t in TMA}


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: f"sm_{arch}")
def test_what_does_not_fit_is_not_offered(arch, gpu):
    gpu(arch)
    limit, found = SHARED_KIB[arch] * 1024, offered()
    fitting = {name for name, need in NEEDS.items() if need <= limit and arch >= 90}
    fitting |= {name for name, need in NEEDS.items() if need <= limit and "tma" not in name}
    assert found.keys() == {"cublaslt", *fitting}
    # Whatever the number of rows, one of our own kernels is there.
    for m in (1, 8, 9, 16, 33, 64, 65, 128, 300, 8192):
        assert any(c.offered(m) for name, c in found.items() if name.startswith("triton"))


def test_algorithms_of_cublaslt_are_offered_for_few_rows(gpu, monkeypatch):
    gpu(90)
    shape, asked = (4096, 4096, torch.bfloat16, False), []
    known = (SimpleNamespace(name="cublaslt 1.2"),)
    monkeypatch.setattr(
        linear_candidates.cublaslt, "algorithms", lambda *of: asked.append(of) or known
    )
    found = offered()["cublaslt 1.2"]
    assert found.run is known[0] and found.offered(512) and not found.offered(513)
    assert asked[0][:4] == shape and asked[0][4][-1] == 512


def test_tma_is_offered_where_rows_are_aligned(gpu):
    gpu(90)
    assert [name for name in offered() if "tma" in name]
    for shape in ({"k": 4100}, {"n": 4100}, {"dtype": torch.float32}):
        assert not [name for name in offered(**shape) if "tma" in name]
    gpu(89)
    assert not [name for name in offered() if "tma" in name]


def test_fp32_is_served_by_our_kernels_alone(gpu):
    gpu(90)
    found = offered(torch.float32)
    assert all(name.startswith("triton") and c.offered(1) for name, c in found.items())
    assert CANONICAL[4].name in found


def test_deep_gemm_is_offered_when_asked_for(gpu, monkeypatch):
    gpu(90)
    monkeypatch.setattr(linear_candidates, "_deep_gemm", lambda: object())

    def asked(**fields):
        shape = Shape(**({"n": 4096, "k": 4096, "dtype": torch.bfloat16} | fields))
        return "deep_gemm" in {c.name for c in candidates(shape, deep_gemm=True)}

    assert asked() and "deep_gemm" not in offered()
    for fields in ({"bias": True}, {"dtype": torch.float16}, {"n": 4104}, {"k": 4112}):
        assert not asked(**fields)
