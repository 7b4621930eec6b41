"""The merge of chunks compiles for every GPU generation that is named, without spills."""

from __future__ import annotations

import pytest

from sgl_det.kernels import merge_chunks

from .compile_targets import ARCHS, Case

POINTERS = {
    **dict.fromkeys(("parts_ptr", "o_ptr"), "bf16"),
    **dict.fromkeys(("parts_lse_ptr", "lse_ptr", "top_ptr", "total_ptr", "acc_ptr"), "fp32"),
    **dict.fromkeys(("first_ptr", "step_ptr", "count_ptr"), "i32"),
    "sinks_ptr": "bf16",
}
STRIDES = ("pr", "ph", "plh", "ot", "oh", "lh")
# heads, head size, heads a program, state, final, last, sinks
WAYS = {
    "decode": (32, 128, 1, False, True, False, False),
    "decode-sinks": (64, 64, 1, False, True, False, True),
    "prefill": (28, 128, 4, False, True, True, False),
    "prefill-first": (32, 128, 4, True, False, False, False),
    "prefill-final": (16, 256, 4, True, True, True, True),
}


def case(way: str) -> Case:
    heads, d, block_h, state, final, last, sinks = WAYS[way]
    absent = {"sinks_ptr": sinks, "top_ptr": state, "total_ptr": state, "acc_ptr": state}
    pointers = {name: f"*{t}" for name, t in POINTERS.items() if absent.get(name, True)}
    return Case(
        name=way,
        kernel=merge_chunks._merge_chunks_kernel,
        signature=pointers | {f"stride_{s}": "i32" for s in STRIDES},
        constexprs={
            **{name: None for name, there in absent.items() if not there},
            "H": heads,
            "D": d,
            "BLOCK_D": d,
            "BLOCK_H": block_h,
            "UNROLL": merge_chunks.UNROLL,
            "STATE": state,
            "FINAL": final,
            "LAST": last,
            "SINKS": sinks,
            "LSE": True,
        },
        num_warps=merge_chunks._warps(block_h * d),
        options={"enable_fp_fusion": False},
    )


# Every way for sm_90, the one that has everything for the others.
CASES = [(w, 90) for w in WAYS] + [("prefill-final", a) for a in ARCHS if a != 90]


@pytest.mark.parametrize("way, arch", CASES, ids=lambda x: x if isinstance(x, str) else f"sm_{x}")
def test_merge_compiles(way, arch):
    built = case(way).compile_for(arch)
    assert not built.spills
    # Products and sums are rounded one by one.
    assert "fma.rn.f32" not in built.ptx
