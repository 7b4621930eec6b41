"""The GPU's sampler compiles for every GPU that SGLang serves on, without spills."""

from __future__ import annotations

import re
import subprocess

import pytest

from sgl_det.kernels import gpu_sampler, nvrtc

from .compile_targets import ARCHS, CUOBJDUMP, SHARED_KIB


@pytest.mark.parametrize("step", gpu_sampler.STEPS, ids=["top", "tally", "choose", "finish"])
@pytest.mark.parametrize("arch", [*map(str, ARCHS), "90a"], ids=lambda x: f"sm_{x}")
def test_it_compiles_without_spills(arch, step, tmp_path):
    launch = gpu_sampler.LAUNCH
    shared = gpu_sampler.shared_bytes(step, launch)
    assert shared <= SHARED_KIB[int(arch.removesuffix("a"))] * 1024
    image = tmp_path / "sampler.cubin"
    named = gpu_sampler.defines(step, launch)
    image.write_bytes(nvrtc.compiled(gpu_sampler.SOURCE, named, f"sm_{arch}"))
    used = [str(CUOBJDUMP), "-res-usage", str(image)]
    said = subprocess.run(used, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{x}:(\d+)", said)[1]) for x in ("REG", "STACK"))
    assert stack == 0, said
    assert registers * gpu_sampler.threads(step, launch) <= 65536, said
