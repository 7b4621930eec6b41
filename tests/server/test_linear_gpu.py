"""On a GPU: whichever proven kernel serves the linear layers, the server's bits are the same.

Servers of one small model, each forced to another kernel, are probed with the same prompts and
compared with the one that chooses freely. One more runs its prefill in CUDA graphs, which the
others leave out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec

import pytest
import requests

from sgl_det.make_model import resolve_model
from sgl_det.probe import compare_reports, run_probe
from sgl_det.server_process import ServerProcess

pytestmark = [pytest.mark.gpu, pytest.mark.server, pytest.mark.timeout(900)]
FLAGS = ("--attention-backend", "fa3", "--max-total-tokens", "40000", "--max-running-requests")
FLAGS = (*FLAGS, "64", "--mem-fraction-static", "0.9", "--cuda-graph-max-bs-decode", "64")
FLAGS = (*FLAGS, "--skip-server-warmup")
NO_GRAPH = "--disable-prefill-cuda-graph"
SERVERS = {
    "free": (NO_GRAPH,),
    "cublaslt": (NO_GRAPH, "--det-linear", "cublaslt"),
    "triton": (NO_GRAPH, "--det-linear", "triton"),
    "prefill graph": (),
    "deep_gemm": (NO_GRAPH, "--det-linear", "deep_gemm"),
}
AXES = ("batch_size", "chunked_prefill")


@dataclass
class Reports:
    """What the probe saw of each server, and which kernels served in it; asked for when needed."""

    servers: dict[str, ServerProcess]
    found: dict = field(default_factory=dict)

    def of(self, name):
        if name not in self.found:
            server = self.servers[name]
            server.wait_ready(400)
            report = run_probe(server.url, quick=True, axes=AXES, progress=False)
            about = requests.get(f"{server.url}/determinism", timeout=60).json()["kernels"]
            print(f"{name}: proof took {about['seconds']} s")
            self.found[name] = report, about["linear"]
        return self.found[name]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    logs = tmp_path_factory.mktemp("linear")
    argv = ("--model-path", resolve_model("qwen3-0.6b"), *FLAGS)
    servers = {
        name: ServerProcess("sgl_det.launch_server", (*argv, *more), log=logs / f"{name}.log")
        for name, more in SERVERS.items()
    }
    try:
        for server in servers.values():
            server.start()
        yield Reports(servers)
    finally:
        for server in servers.values():
            server.stop()


def kernels(layers):
    return {b["kernel"] for layer in layers.values() for b in layer["buckets"]}


def test_kernels_chosen_freely_are_several(reports):
    assert len(kernels(reports.of("free")[1])) > 2


@pytest.mark.parametrize("name", [name for name in SERVERS if name != "free"])
def test_bits_stay(reports, name):
    if name == "deep_gemm" and find_spec("deep_gemm") is None:
        pytest.skip("DeepGEMM is not installed")
    report, layers = reports.of(name)
    assert report.passed, report.table()
    row = compare_reports(reports.of("free")[0].to_json(), report.to_json())
    assert row.requests > 20 and row.verdict == "bitwise", str(row.first)
    if "--det-linear" in SERVERS[name]:
        assert {kernel.split()[0] for kernel in kernels(layers)} == {name}
