"""Tests of Triton kernels: on the GPU where there is one, and small in Triton's interpreter.

A kernel is compiled or interpreted for the life of its process, from the moment it is decorated. So
one test file serves both: collected here its tests are marked gpu, and `test_interpreted.py` runs
the file once more in a child process whose Triton interprets, on the CPU. A file takes part by

    from .interpreter import DEVICE, MARKS, pick
    pytestmark = MARKS
    SIZES = pick(gpu=[64, 4096], interpreter=[64])

and by its name in the list of `test_interpreted.py`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cpu_support import DTYPES

from . import triton_interpreter

HERE = Path(__file__).resolve().parent
ACTIVE = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if ACTIVE else "cuda"
MARKS = [] if ACTIVE else [pytest.mark.gpu]

if ACTIVE:
    triton_interpreter.install()


def pick(*, gpu, interpreter):
    """The sizes for a GPU, or those that an interpreter can do in seconds."""
    return interpreter if ACTIVE else gpu


def _every(dtypes):
    return pytest.mark.parametrize("dtype", dtypes, ids=lambda d: str(d).removeprefix("torch."))


# For tests of an order, which is the same in every dtype: fp32 shows it best.
order_dtypes = _every(pick(gpu=DTYPES, interpreter=[torch.float32]))


def run(name: str) -> None:
    """Run a test file of this folder in the interpreter. Raises AssertionError with its output."""
    child = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            # numpy warns of the infinities and NaNs that the kernels are given on purpose.
            *("-W", "ignore::RuntimeWarning", str(HERE / name)),
        ],
        cwd=HERE.parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    ran = re.search(r"\d+ passed", child.stdout) and " skipped" not in child.stdout
    assert child.returncode == 0 and ran, (child.stdout + child.stderr)[-8000:]
