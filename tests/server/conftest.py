"""Real servers on the CPU, started once for a session and side by side."""

from __future__ import annotations

import pytest

from sgl_det.server_process import ServerProcess, running
from support import CPU, arguments


@pytest.fixture(scope="session")
def servers(demo_model, tmp_path_factory):
    """Three servers: stock, ours, and ours again: of equal key, and it takes more requests.

    Those without a seed get one of their content, and they may bring a logit processor.
    """
    logs = tmp_path_factory.mktemp("servers")
    argv = arguments(demo_model)
    found = {
        "stock": ServerProcess("sgl_det.stock", argv, log=logs / "stock.log", env=CPU),
        "ours": ServerProcess("sgl_det.launch_server", argv, log=logs / "ours.log", env=CPU),
        "again": ServerProcess(
            "sgl_det.launch_server",
            (*argv, "--det-default-seed", "5", "--enable-custom-logit-processor"),
            log=logs / "again.log",
            env=CPU,
        ),
    }
    with running(found.values(), 400):
        yield found


@pytest.fixture(scope="session")
def stock_server(servers):
    return servers["stock"]


@pytest.fixture(scope="session")
def sgl_det_server(servers):
    return servers["ours"]


@pytest.fixture(scope="session")
def restarted_server(servers):
    return servers["again"]
