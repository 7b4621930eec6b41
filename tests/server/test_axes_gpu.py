"""Each GPU backend through the probe, in the three arms of ``benchmarks/axes.py``.

The Qwen3-8B shape by default; SGL_DET_TEST_MODEL names another. Reports and logs are kept in the
folder SGL_DET_TEST_OUT, where one is named; arms whose report lies there already are not run again.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.server, pytest.mark.timeout(1800)]
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "axes.py"


@pytest.fixture(scope="module")
def axes():
    spec = importlib.util.spec_from_file_location("benchmarks_axes", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("backend", ["fa3", "triton", "flashinfer"])
def test_claimed_axes_are_bitwise_and_stock_diverges(axes, backend, tmp_path):
    folder = Path(os.environ.get("SGL_DET_TEST_OUT") or tmp_path)
    missing = [(backend, a) for a in axes.ARMS if not (folder / f"{backend}-{a}.json").is_file()]
    model = os.environ.get("SGL_DET_TEST_MODEL", "qwen3-8b")
    assert not axes.measure(missing, model, folder)
    assert not axes.problems(axes.write(folder), backend)
