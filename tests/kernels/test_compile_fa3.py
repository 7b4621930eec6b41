"""Decode in FA3's order compiles for Hopper, the one GPU that FA3 runs on, without spills."""

from __future__ import annotations

import re
import subprocess

import pytest

from sgl_det.kernels import fa3_chain, fa3_decode_kernels, nvrtc
from sgl_det.kernels.fa3_chunks import CHUNKS, TILES

from . import cuda_emulator
from .compile_targets import CUOBJDUMP, SHARED_KIB, Case

HOPPER = 90
POINTERS = {
    **dict.fromkeys(("q_ptr", "k_ptr", "o_ptr"), "*bf16"),
    **dict.fromkeys(("scores_ptr", "tops_ptr", "parts_ptr", "ends_ptr"), "*fp32"),
    **dict.fromkeys(("table_ptr", "lengths_ptr"), "*i32"),
}
KERNELS = ("scores", "finish")
# heads, group, head size
HEADS = {"qwen3-8b": (32, 4, 128), "qwen2.5-7b": (28, 7, 128), "llama-1b": (32, 4, 64)}
HEADS["qwen3-32b"] = (64, 8, 128)


def case(name: str, heads: str) -> Case:
    kernel = getattr(fa3_decode_kernels, f"fa3_{name}_kernel")
    h, group, d = HEADS[heads]
    sizes = {"H": h, "GROUP": group, "D": d, "N": TILES[d], "BLOCK_M": 16, "CHUNK": CHUNKS[d]}
    constexprs = sizes | {"UNROLL": 1, "SINKS": False, "EXACT": False, "sinks_ptr": None}
    constexprs |= {"PDL": True}
    names = [p.name for p in kernel.params]
    kinds = {"log": "fp32", "chunks": "i32"}
    signature = {
        name: POINTERS.get(name) or kinds.get(name, "i32")
        for name in names
        if name not in constexprs
    }
    return Case(
        name=f"{name} {heads}",
        kernel=kernel,
        signature=signature,
        constexprs={key: value for key, value in constexprs.items() if key in names},
        num_warps=1 if name == "finish" else 4,
        options={"enable_fp_fusion": False},
    )


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", KERNELS)
def test_it_compiles_without_spills(name, heads):
    built = case(name, heads).compile_for(HOPPER)
    assert built.shared <= SHARED_KIB[HOPPER] * 1024
    assert not built.spills


@pytest.mark.parametrize("single", [True, False], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("heads", HEADS)
def test_the_chain_compiles_without_spills(heads, single, tmp_path):
    _, group, d = HEADS[heads]
    launch = fa3_chain.LAUNCH
    named = fa3_chain.defines(d, group, CHUNKS[d], single, launch)
    assert fa3_chain.shared_bytes(d, group, CHUNKS[d], launch) <= SHARED_KIB[HOPPER] * 1024
    image = tmp_path / "chain.cubin"
    image.write_bytes(nvrtc.compiled(fa3_chain.SOURCE, named, fa3_chain.ARCH))
    used = [str(CUOBJDUMP), "-res-usage", str(image)]
    said = subprocess.run(used, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{x}:(\d+)", said)[1]) for x in ("REG", "STACK"))
    assert stack == 0, said
    assert registers * fa3_chain.threads(launch) <= 65536, said


def test_what_the_compiler_says_is_in_the_error():
    with pytest.raises(RuntimeError, match="held by the caller"):
        named = fa3_chain.defines(128, 4, 4096, True, fa3_chain.Launch(16, 3))
        nvrtc.compiled(fa3_chain.SOURCE, named, fa3_chain.ARCH)


@cuda_emulator.needs_compiler
@pytest.mark.parametrize("heads", HEADS)
def test_the_layout_is_that_of_the_source(heads):
    _, group, d = HEADS[heads]
    for launch in (fa3_chain.LAUNCH, fa3_chain.Launch(16, 8)):
        library = cuda_emulator.built(d, group, CHUNKS[d], True, launch)
        assert library.of_threads() == fa3_chain.threads(launch)
        assert library.of_bytes() == fa3_chain.shared_bytes(d, group, CHUNKS[d], launch)
