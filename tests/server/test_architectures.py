"""Other architectures than the demo's through the probe, on a CPU and on each GPU backend.

Llama has no norms of queries and keys, and frequencies of its own; Qwen2 has biases, and 14 query
heads on 2 key heads. Gemma has windows, capped logits and heads of 256: Triton alone holds it, and
the others refuse it by name.
"""

from __future__ import annotations

import pytest

from sgl_det.backend import BACKENDS
from sgl_det.make_model import resolve_model
from sgl_det.probe import run_probe
from sgl_det.server_process import ServerProcess
from support import CPU, arguments

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]
MODELS = ("demo-llama", "demo-qwen2")
HEAD_DIM = 64
ON_GPU = [name for name, b in BACKENDS.items() if b.head_dims and HEAD_DIM in b.head_dims]
FLAGS = ("--max-total-tokens", "40000", "--max-running-requests", "64", "--skip-server-warmup")
FLAGS = (*FLAGS, "--mem-fraction-static", "0.9", "--cuda-graph-max-bs-decode", "8")


def assert_probe_passes(argv, log, env=None):
    server = ServerProcess("sgl_det.launch_server", argv, log=log, env=env)
    try:
        server.start().wait_ready(400)
        report = run_probe(server.url, quick=True, progress=False)
    finally:
        server.stop()
    assert report.passed, report.table()
    assert report.subject["unique_tokens"] == report.subject["unique_logprobs"] == 1


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_probe_passes_on_a_cpu(model, tmp_path):
    assert_probe_passes(arguments(resolve_model(model)), tmp_path / "server.log", CPU)


@pytest.mark.gpu
def test_probe_passes_on_a_model_with_windows_and_caps(tmp_path):
    argv = ("--model-path", resolve_model("demo-gemma2"), "--attention-backend", "triton", *FLAGS)
    assert_probe_passes(argv, tmp_path / "server.log")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ON_GPU)
@pytest.mark.parametrize("model", MODELS)
def test_probe_passes_on_a_gpu(model, backend, tmp_path):
    argv = ("--model-path", resolve_model(model), "--attention-backend", backend, *FLAGS)
    assert_probe_passes(argv, tmp_path / "server.log")
