"""Compile a Triton kernel for a GPU that is not here, and read what the compiler says of it.

Errors, spills and tiles that exceed a GPU's shared memory are found so on any machine.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Shared memory that a thread block may have, in KiB (CUDA programming guide).
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
ARCHS = tuple(SHARED_KIB)
CUOBJDUMP = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"


class Built(NamedTuple):
    """shared: bytes a block; registers, spills (bytes on the stack): a thread, None if unknown."""

    shared: int
    registers: int | None
    spills: int | None
    ptx: str


@dataclass(frozen=True, kw_only=True)
class Case:
    """One compilation: the kernel, its arguments' types by name, its constants, its options."""

    name: str
    kernel: object
    signature: dict[str, str]
    constexprs: dict[str, object]
    num_warps: int = 4
    num_stages: int = 3
    options: dict[str, object] = field(default_factory=dict)

    def compile_for(self, arch: int) -> Built:
        return compile_for(
            self.kernel,
            arch,
            self.signature,
            self.constexprs,
            self.num_warps,
            self.num_stages,
            **self.options,
        )


def compile_for(
    kernel,
    arch: int,
    signature: dict[str, str],
    constexprs: dict[str, object],
    num_warps: int = 4,
    num_stages: int = 3,
    **options,
) -> Built:
    """Compile ``kernel`` for compute capability ``arch`` (90: Hopper).

    signature names the types of the arguments that are no constants, as "*bf16" or "i32". Pointers
    and whole numbers count as multiples of 16, as at a launch, except under do_not_specialize.
    """
    aligned = [["tt.divisibility", 16]]
    attributes = {
        (p.num,): aligned
        for p in kernel.params
        if p.name in signature and signature[p.name][0] in "*i" and not p.do_not_specialize
    }
    source = ASTSource(
        fn=kernel,
        signature={p.name: signature.get(p.name, "constexpr") for p in kernel.params},
        constexprs=constexprs,
        attrs=attributes,
    )
    built = triton.compile(
        source,
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": num_warps, "num_stages": num_stages, **options},
    )
    registers, spills = _usage(built.asm["cubin"])
    return Built(built.metadata.shared, registers, spills, built.asm["ptx"])


def _usage(cubin: bytes) -> tuple[int | None, int | None]:
    """Registers and stack bytes a thread, by cuobjdump; None for both where it is not installed."""
    if not CUOBJDUMP.exists():
        return None, None
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, f"cuobjdump says nothing of registers: {text}"
    return int(found[1]), int(found[2])
