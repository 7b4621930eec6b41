"""On a GPU: whichever proven kernel serves the linear layers, the server's bits are the same.

Servers of one small model, each forced to another kernel, are probed with the same prompts and
compared with the one that chooses freely.
"""

from __future__ import annotations

import pytest
import requests

from sgl_det.make_model import resolve_model
from sgl_det.probe import compare_reports, run_probe
from sgl_det.server_process import ServerProcess

pytestmark = [pytest.mark.gpu, pytest.mark.server, pytest.mark.timeout(900)]
KERNELS = ("", "cublaslt", "triton")
FLAGS = ("--attention-backend", "fa3", "--max-total-tokens", "40000", "--max-running-requests")
FLAGS = (*FLAGS, "64", "--mem-fraction-static", "0.9", "--cuda-graph-max-bs-decode", "64")
FLAGS = (*FLAGS, "--disable-prefill-cuda-graph", "--skip-server-warmup")
AXES = ("batch_size", "chunked_prefill")


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What the probe saw of each server, and which kernels served in it."""
    logs, found = tmp_path_factory.mktemp("linear"), {}
    argv = ("--model-path", resolve_model("qwen3-0.6b"), *FLAGS)
    servers = {
        kernel: ServerProcess(
            "sgl_det.launch_server",
            (*argv, *(("--det-linear", kernel) if kernel else ())),
            log=logs / f"{kernel or 'free'}.log",
        )
        for kernel in KERNELS
    }
    try:
        for server in servers.values():
            server.start()
        for kernel, server in servers.items():
            server.wait_ready(400)
            report = run_probe(server.url, quick=True, axes=AXES, progress=False)
            layers = requests.get(f"{server.url}/determinism", timeout=60).json()["kernels"]
            found[kernel] = report, layers["linear"]
    finally:
        for server in servers.values():
            server.stop()
    return found


@pytest.mark.parametrize("kernel", KERNELS[1:])
def test_forced_kernel_serves_and_bits_stay(reports, kernel):
    report, layers = reports[kernel]
    assert report.passed, report.table()
    served = {b["kernel"] for layer in layers.values() for b in layer["buckets"]}
    assert {name.split()[0] for name in served} == {kernel}
    row = compare_reports(reports[""][0].to_json(), report.to_json())
    assert row.requests > 20 and row.verdict == "bitwise", str(row.first)


def test_kernels_chosen_freely_are_several(reports):
    served = {b["kernel"] for layer in reports[""][1].values() for b in layer["buckets"]}
    assert len(served) > 2
