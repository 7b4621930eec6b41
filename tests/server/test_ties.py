"""Logits that tie, as bf16's often do: a greedy request keeps its token beside one that samples.

Long, since it wants a server of another dtype than the other tests on a CPU.
"""

from __future__ import annotations

import pytest

from sgl_det.axis import Axis
from sgl_det.make_model import resolve_model
from sgl_det.probe import run_probe
from sgl_det.server_process import ServerProcess
from support import CPU, arguments

pytestmark = [pytest.mark.server, pytest.mark.long, pytest.mark.timeout(600)]


def test_sampling_neighbours_do_not_break_ties(tmp_path):
    argv = (*arguments(resolve_model("demo")), "--dtype", "bfloat16")
    with ServerProcess("sgl_det.launch_server", argv, log=tmp_path / "log", env=CPU) as server:
        server.wait_ready(400)
        report = run_probe(server.url, quick=True, axes=[Axis.BATCH_COMPOSITION], progress=False)
    assert report.passed, report.table()
