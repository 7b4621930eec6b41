"""Every way to sample in every neighbourhood: on a CPU, and on a GPU's three backends together."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

import sampled
from sampled import EVERY_TARGET, TIMEOUT
from sgl_det.server_process import running
from support import gpu_servers

pytestmark = [pytest.mark.server, pytest.mark.timeout(3600)]
FLAGS = ("--max-total-tokens", "40000", "--max-running-requests", "64", "--skip-server-warmup")
FLAGS = (*FLAGS, "--mem-fraction-static", "0.9", "--cuda-graph-max-bs-decode", "16")
CONTROL = ("plain", "top_k", "top_p", "greedy", "warm-greedy", "filters")


def changed(url, names):
    """What neighbours changed, how many answers were compared, how many targets differ."""
    requests.post(f"{url}/freeze_gc", timeout=TIMEOUT)
    wrong, compared, distinct = [], 0, set()
    for name in names:
        alone = sampled.alone(url, name)
        found = sampled.every_case(url, name)
        distinct.add(alone[0])
        compared += len(found)
        wrong += [f"{name}: {case}" for case, answer in found.items() if answer != alone]
    return {"wrong": wrong, "compared": compared, "distinct": len(distinct)}


def assert_bitwise(found):
    assert not found["wrong"], found["wrong"][:20]
    assert found["compared"] >= 60 * 12 and found["distinct"] == len(EVERY_TARGET)


@pytest.mark.long
def test_neighbours_change_no_bit_on_a_cpu(sgl_det_server):
    assert_bitwise(changed(sgl_det_server.url, EVERY_TARGET))


@pytest.mark.gpu
def test_neighbours_change_no_bit_on_a_gpu(tmp_path):
    servers = gpu_servers(FLAGS, tmp_path, {})
    with running(servers.values(), 400), ThreadPoolExecutor(len(servers)) as threads:
        urls = [server.url for server in servers.values()]
        found = dict(zip(servers, threads.map(changed, urls, [EVERY_TARGET] * 3), strict=True))
    out = Path(os.environ.get("SGL_DET_TEST_OUT", tmp_path))
    (out / "sampling-matrix.json").write_text(json.dumps(found, indent=1))
    for one in found.values():
        assert_bitwise(one)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton"])
def test_control_neighbours_change_answers_of_stocks_deterministic_mode(backend, tmp_path):
    flags = (*FLAGS, "--enable-deterministic-inference")
    args = {"module": "sgl_det.stock", "backends": (backend,)}
    (server,) = gpu_servers(flags, tmp_path, {}, **args).values()
    # A seeded request with min_p ends it, so no neighbour has one.
    kinds = ("greedy", "top_p", "top_k", "unfiltered")
    with running([server], 400):
        alone = {name: sampled.alone(server.url, name) for name in CONTROL[:-1]}
        wrong = [
            f"{name}: {kind}"
            for name in alone
            for kind in kinds
            if sampled.beside(server.url, name, kind) != alone[name]
        ]
    assert wrong
