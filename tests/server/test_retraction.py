"""Requests that lose their place while they generate, and are computed again: the same bits.

SGLang retracts requests when the KV cache is full. What they had generated is then computed anew as
part of a prompt, in chunks, so decode's keys and values are replaced by prefill's.
"""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from sgl_det.server_process import ServerProcess, running
from support import CPU, arguments

pytestmark = pytest.mark.server
FLAGS = ("--max-total-tokens", "4096", "--chunked-prefill-size", "64", "--enable-metrics")
RETRACT = {"SGLANG_TEST_RETRACT": "true", "SGLANG_TEST_RETRACT_INTERVAL": "4"}
LENGTHS = (1, 2, 15, 16, 17, 40, 63, 64, 65, 90, 127, 129)
NEW = 40


@pytest.fixture(scope="module")
def servers(demo_model, tmp_path_factory):
    """Stock's and ours, which retract a request every few steps while there are several."""
    logs = tmp_path_factory.mktemp("retraction")
    argv = (*arguments(demo_model), *FLAGS)
    found = {
        name: ServerProcess(f"sgl_det.{name}", argv, log=logs / f"{name}.log", env=CPU | RETRACT)
        for name in ("stock", "launch_server")
    }
    with running(found.values(), 400):
        yield found


def bits(url: str, length: int) -> str:
    """Token ids and log-probabilities of a prompt of so many tokens."""
    rng = random.Random(length)
    body = {
        "input_ids": [rng.randrange(256) for _ in range(length)],
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 3,
    }
    answer = requests.post(f"{url}/generate", json=body, timeout=300).json()
    meta = answer["meta_info"]
    return json.dumps([meta["output_token_logprobs"], meta["output_top_logprobs"]])


def retracted(url: str) -> int:
    """How many requests were retracted since the start."""
    text = requests.get(f"{url}/metrics", timeout=60).text
    found = re.findall(r"^sglang:num_retracted_requests_total\{.*\} (\S+)$", text, re.MULTILINE)
    return int(sum(map(float, found)))


def differing(url: str) -> list[int]:
    """Lengths of the prompts whose bits with the others are not those alone, on a cold cache."""
    alone = {}
    for length in LENGTHS:
        requests.post(f"{url}/flush_cache", timeout=60).raise_for_status()
        alone[length] = bits(url, length)
    assert retracted(url) == 0
    with ThreadPoolExecutor(len(LENGTHS)) as pool:
        together = dict(zip(LENGTHS, pool.map(lambda n: bits(url, n), LENGTHS), strict=True))
    assert retracted(url) >= 10
    return [n for n in LENGTHS if together[n] != alone[n]]


def test_retracted_requests_keep_their_bits(servers):
    assert differing(servers["launch_server"].url) == []


def test_control_stock_changes(servers):
    """More than the request whose first log-probability it may have lost."""
    assert len(differing(servers["stock"].url)) > 2
