"""Random waits on the GPU's stream: what the host does beside running kernels changes no bit.

The log says that they are there; the control is a server with a race for them to find.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_det.probe import run_probe
from sgl_det.server_process import running
from support import gpu_servers, injected

pytestmark = [pytest.mark.server, pytest.mark.gpu, pytest.mark.timeout(900)]
FOLDER = Path(__file__).parent / "delays"
FLAGS = ("--max-total-tokens", "40000", "--max-running-requests", "64", "--skip-server-warmup")
FLAGS = (*FLAGS, "--mem-fraction-static", "0.9", "--cuda-graph-max-bs-decode", "16")
FLAGS = (*FLAGS, "--chunked-prefill-size", "512")
AXES = ("run_to_run", "batch_size", "arrival_order", "chunked_prefill", "prefix_cache")
AXES = (*AXES, "prefill_vs_decode")
ENV = injected(FOLDER)


def test_waits_on_the_stream_change_no_bit(tmp_path):
    servers = gpu_servers(FLAGS, tmp_path, ENV)
    with running(servers.values(), 400):
        for name, server in servers.items():
            report = run_probe(server.url, quick=True, axes=AXES, progress=False, limit_s=90)
            assert report.passed, f"{name}\n{report.table()}"
            assert "the forward pass waits" in server.log.read_text(errors="replace")


def test_control_a_race_shows(tmp_path):
    """The tokens of a pass are overwritten a moment after it begins: waits do not hide it."""
    env = ENV | {"SGL_DET_TEST_RACE": "1"}
    (server,) = gpu_servers(FLAGS, tmp_path, env, backends=("triton",)).values()
    with running([server], 400):
        report = run_probe(server.url, quick=True, axes=AXES[:2], progress=False, limit_s=90)
        assert "the forward pass waits" in server.log.read_text(errors="replace")
    assert sum(row.mismatches for row in report.rows), report.table()
