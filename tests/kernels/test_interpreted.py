"""The Triton kernels' tests once more, in Triton's interpreter: see `interpreter.py`."""

from __future__ import annotations

import pytest

from . import interpreter

FILES = [
    "test_triton_interpreter.py",
    "test_rms_norm.py",
    "test_log_softmax.py",
    "test_mean.py",
    "test_matmul.py",
    "test_matmul_tma.py",
    "test_bmm.py",
    "test_aten_cuda.py",
    "test_attention.py",
    "test_attention_proof.py",
    "test_merge_chunks.py",
    "test_fa3_decode.py",
    "test_gpu_sampler.py",
    "test_thread_order.py",
    "test_sampler_proof.py",
]


@pytest.mark.parametrize("name", FILES)
def test_kernels_in_the_interpreter(name):
    interpreter.run(name)
