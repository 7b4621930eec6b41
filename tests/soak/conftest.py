"""The soak's CPU servers: small KV pools, so that requests are retracted."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_det.server_process import ServerProcess, running
from support import CPU, arguments, injected

# SGLang admits by what it expects of answers; with little caution it has to retract some.
FLAGS = ("--max-total-tokens", "2000", "--schedule-conservativeness", "0.1", "--enable-metrics")
# And on a fast machine too.
RETRACT = {"SGLANG_TEST_RETRACT": "true", "SGLANG_TEST_RETRACT_INTERVAL": "50"}
PLANT = Path(__file__).parent / "plant"


def server(name: str, model: str, logs: Path, module: str = "sgl_det.launch_server", env=None):
    argv = (*arguments(model), *FLAGS)
    return ServerProcess(module, argv, log=logs / f"{name}.log", env=CPU | (env or {}))


@pytest.fixture(scope="module")
def servers(demo_model, tmp_path_factory):
    """Ours, ours with the planted kernel, and stock; they come up side by side."""
    logs = tmp_path_factory.mktemp("soak")
    found = {
        "ours": server("ours", demo_model, logs, env=RETRACT),
        "planted": server("planted", demo_model, logs, env=injected(PLANT)),
        "stock": server("stock", demo_model, logs, "sgl_det.stock"),
    }
    with running(found.values(), 400):
        yield found
