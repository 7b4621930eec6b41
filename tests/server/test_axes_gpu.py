"""Each GPU backend through the probe, in the three arms of ``benchmarks/axes.py``.

The Qwen3-8B shape by default; SGL_DET_TEST_MODEL names another. With SGL_DET_TEST_OUT the rows are
merged into ``axes.json`` in that folder, and the servers' logs are kept there.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from sgl_det.make_model import resolve_model

pytestmark = [pytest.mark.gpu, pytest.mark.server]
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "axes.py"


@pytest.fixture(scope="module")
def axes():
    spec = importlib.util.spec_from_file_location("benchmarks_axes", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=["fa3", "triton", "flashinfer"])
def rows(request, axes, tmp_path_factory):
    model = resolve_model(os.environ.get("SGL_DET_TEST_MODEL", "qwen3-8b"))
    out = os.environ.get("SGL_DET_TEST_OUT")
    folder = Path(out) if out else tmp_path_factory.mktemp("axes")
    found = []

    def done(backend, reports):
        found.extend(axes.rows(backend, reports))
        axes.merge(folder / "axes.json", found)
        print(reports["sgl_det"].table())

    axes.measure([request.param], model, folder, done)
    assert found, f"a server of {request.param} did not start or died, see {folder}"
    return found


def test_claimed_axes_are_bitwise(rows):
    ours = [r for r in rows if r["arm"] == "sgl_det" and r["claimed"]]
    bad = [(r["axis"], r["verdict"], r["first"]) for r in ours if r["verdict"] != "bitwise"]
    assert ours and not bad, bad


def test_control_diverges(rows):
    stock = {r["axis"]: r["verdict"] for r in rows if r["arm"] == "stock"}
    assert stock["batch_size"] == "diverged"
