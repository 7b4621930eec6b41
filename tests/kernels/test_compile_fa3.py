"""Decode in FA3's order compiles for Hopper, the one GPU that FA3 runs on, without spills."""

from __future__ import annotations

import pytest

from sgl_det.kernels import fa3_decode, fa3_decode_kernels

from .compile_targets import SHARED_KIB, Case

HOPPER = 90
POINTERS = {
    **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "weights_ptr", "o_ptr"), "*bf16"),
    **dict.fromkeys(("scores_ptr", "tops_ptr", "rescales_ptr", "parts_ptr", "ends_ptr"), "*fp32"),
    **dict.fromkeys(("table_ptr", "lengths_ptr"), "*i32"),
}
KERNELS = ("scores", "weights", "chain", "finish")
# heads, group, head size
HEADS = {"qwen3-8b": (32, 4, 128), "qwen2.5-7b": (28, 7, 128), "llama-1b": (32, 4, 64)}
HEADS["qwen3-32b"] = (64, 8, 128)


def case(name: str, heads: str) -> Case:
    kernel = getattr(fa3_decode_kernels, f"fa3_{name}_kernel")
    h, group, d = HEADS[heads]
    launch, n, chunk = fa3_decode._LAUNCH, fa3_decode.TILES[d], fa3_decode.CHUNKS[d]
    sizes = {"H": h, "GROUP": group, "D": d, "N": n, "BLOCK_M": 16, "TILES": chunk // n}
    sizes |= {"BLOCK_G": 1 << (group - 1).bit_length(), "DV": launch.dv, "CHUNK": chunk}
    constexprs = sizes | {"UNROLL": 1, "SINKS": False, "EXACT": False, "sinks_ptr": None}
    names = [p.name for p in kernel.params]
    kinds = {"log": "fp32", "log2": "fp32", "chunks": "i32"}
    signature = {
        name: POINTERS.get(name) or kinds.get(name, "i32")
        for name in names
        if name not in constexprs
    }
    warps, stages = {"weights": (2, 3), "chain": launch[1:], "finish": (1, 3)}.get(name, (4, 3))
    return Case(
        name=f"{name} {heads}",
        kernel=kernel,
        signature=signature,
        constexprs={key: value for key, value in constexprs.items() if key in names},
        num_warps=warps,
        num_stages=stages,
        options={"enable_fp_fusion": False},
    )


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", KERNELS)
def test_it_compiles_without_spills(name, heads):
    built = case(name, heads).compile_for(HOPPER)
    assert built.shared <= SHARED_KIB[HOPPER] * 1024
    assert not built.spills
    fused = [line for line in built.ptx.splitlines() if "fma.rn" in line]
    if name == "chain":
        # One for each thread's sum: the first key of a tile; nothing else is fused.
        assert 0 < len(fused) <= 8
