"""The tokens known beforehand: those of the CPU, of the GPU or its emulator, and no others."""

from __future__ import annotations

from functools import partial

import pytest

from sgl_det.kernels import gpu_sampler, sampler, sampler_proof

from . import cuda_emulator
from .interpreter import ACTIVE, DEVICE, MARKS

pytestmark = [*MARKS]
if ACTIVE:
    pytestmark.append(cuda_emulator.needs_compiler)


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    """Where there is no GPU its kernels are emulated."""
    if ACTIVE:
        monkeypatch.setattr(gpu_sampler, "run", cuda_emulator.run_sampler)
        small = partial(gpu_sampler.sample, launch=gpu_sampler.Launch(64, 64, 4096, 4))
        monkeypatch.setattr(sampler_proof, "sample", small)


def test_the_gpus_kernels_draw_them():
    assert sampler_proof.check(DEVICE) == "sgl_det"


def test_the_cpus_kernel_draws_them(monkeypatch):
    monkeypatch.setattr(sampler_proof, "sample", sampler.sample)
    assert sampler_proof.check("cpu") == "sgl_det"


def test_control_a_row_that_sees_another_is_refused(monkeypatch):
    def wrong(logits, *others):
        found = sampler.sample(logits, *others)
        return found + (len(found) == 1)

    monkeypatch.setattr(sampler_proof, "sample", wrong)
    with pytest.raises(RuntimeError, match=r"draws token 23206 in row 0 alone, expected 23205"):
        sampler_proof.check("cpu")


def test_the_key_knows_the_sources():
    assert sampler_proof.sources("cpu") != sampler_proof.sources("cuda")
