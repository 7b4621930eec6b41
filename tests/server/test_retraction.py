"""Requests that lose their place while they generate, and are computed again: the same bits.

SGLang retracts requests when the KV cache is full. What they had generated is then computed anew as
part of a prompt, so decode's keys and values are replaced by prefill's. Here it does so every few
steps, and admits none while many run, so that it takes another request each time.

On a GPU the model is the Qwen3-0.6B shape, or the one that SGL_DET_TEST_MODEL names; servers of all
three backends come up side by side, and a stock one beside them. Their logs are kept in the folder
SGL_DET_TEST_OUT, where one is named.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import requests

from sgl_det.server_process import ServerProcess, running
from support import CPU, GPU_BACKENDS, arguments, gpu_servers

pytestmark = pytest.mark.server
FLAGS = ("--max-total-tokens", "4096", "--chunked-prefill-size", "64")
RETRACT = {"SGLANG_TEST_RETRACT": "true", "SGLANG_TEST_RETRACT_INTERVAL": "4"}
# While more requests than this run, none is admitted.
MANY = "SGLANG_TEST_RETRACT_NO_PREFILL_BS"
LENGTHS = (1, 2, 15, 16, 17, 40, 63, 64, 65, 90, 127, 129)
NEW = 40
GPU_FLAGS = ("--max-total-tokens", "20480", "--chunked-prefill-size", "512")
GPU_FLAGS = (*GPU_FLAGS, "--max-running-requests", "64", "--mem-fraction-static", "0.9")
GPU_FLAGS = (*GPU_FLAGS, "--cuda-graph-max-bs-decode", "32", "--skip-server-warmup")
# SGLang's deterministic Triton aligns chunks to 4096 tokens; smaller ones never run.
STOCK = ("--enable-deterministic-inference", "--chunked-prefill-size", "8192")
STOCK = (*STOCK, "--disable-prefill-cuda-graph")
# Both sides of tiles, splits and chunks: answers of NEW tokens cross 64, 128, 512, 1024 and 4096.
# Together they hold 18,000 tokens, so that the pool is nearly full.
GPU_LENGTHS = (1, 2, 17, 33, 50, 63, 65, 100, 120, 127, 129, 255, 300, 490, 500, 511, 513, 700)
GPU_LENGTHS = (*GPU_LENGTHS, 1000, 1023, 1025, 1500, 2040, 2049, 4080)


@pytest.fixture(scope="module")
def servers(demo_model, tmp_path_factory):
    """Stock's and ours."""
    logs = tmp_path_factory.mktemp("retraction")
    argv = (*arguments(demo_model), *FLAGS)
    found = {
        name: ServerProcess(
            f"sgl_det.{name}", argv, log=logs / f"{name}.log", env=CPU | RETRACT | {MANY: "4"}
        )
        for name in ("stock", "launch_server")
    }
    with running(found.values(), 400):
        yield found


@pytest.fixture(scope="module", name="on_gpu")
def started_on_gpu(tmp_path_factory):
    """Ours on each backend, by name, and stock's; started, and not yet waited for."""
    logs = Path(os.environ.get("SGL_DET_TEST_OUT") or tmp_path_factory.mktemp("retraction-gpu"))
    env = RETRACT | {MANY: "12"}
    found = gpu_servers(GPU_FLAGS, logs, env, "retraction-")
    stock = {"module": "sgl_det.stock", "backends": ("triton",)}
    (found["stock"],) = gpu_servers(
        (*GPU_FLAGS, *STOCK), logs, env, "retraction-stock-", **stock
    ).values()
    try:
        for server in found.values():
            server.start()
        yield found
    finally:
        for server in found.values():
            server.stop()


class Answer(NamedTuple):
    """Token ids and log-probabilities, of each token, and how often the request was retracted."""

    tokens: list[object]
    retractions: int


class Differing(NamedTuple):
    """Lengths of prompts: all whose bits differ, and those that were retracted and differ later.

    Later: beyond the first token, whose log-probability stock may lose where it retracts.
    """

    all: list[int]
    retracted: list[int]


def how(length: int, sampled: bool) -> dict[str, object]:
    """Greedy, or one of some ways to sample and to penalise what was generated."""
    if not sampled:
        return {"temperature": 0}
    ways = (
        {"top_p": 0.9},
        {"frequency_penalty": 0.7, "presence_penalty": 0.3},
        {"temperature": 0, "frequency_penalty": 1.1},
        {"repetition_penalty": 1.3, "min_p": 0.02},
    )
    return {"sampling_seed": length, **ways[LENGTHS.index(length) % len(ways)]}


def answer(url: str, length: int, sampled: bool = False) -> Answer:
    """What follows a prompt of so many tokens."""
    rng = random.Random(length)
    body = {
        "input_ids": [rng.randrange(256) for _ in range(length)],
        "sampling_params": {"max_new_tokens": NEW, "ignore_eos": True, **how(length, sampled)},
        "return_logprob": True,
        "top_logprobs_num": 3,
    }
    meta = requests.post(f"{url}/generate", json=body, timeout=300).json()["meta_info"]
    told = zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=False)
    return Answer(list(told), meta["num_retractions"])


def differing(url: str, lengths: Sequence[int] = LENGTHS, *, sampled: bool = False) -> Differing:
    """The prompts whose bits with the others are not those alone, on a cold cache."""
    alone = {}
    for length in lengths:
        requests.post(f"{url}/flush_cache", timeout=60).raise_for_status()
        alone[length] = answer(url, length, sampled)
    requests.post(f"{url}/flush_cache", timeout=60).raise_for_status()
    with ThreadPoolExecutor(len(lengths)) as pool:
        found = pool.map(lambda n: answer(url, n, sampled), lengths)
        together = dict(zip(lengths, found, strict=True))
    times = {n: a.retractions for n, a in together.items() if a.retractions}
    print(f"retractions by length of the prompt: {times}")
    assert not any(a.retractions for a in alone.values())
    assert len(times) >= 4 and sum(times.values()) >= 10
    return Differing(
        [n for n in lengths if together[n].tokens != alone[n].tokens],
        [n for n in times if together[n].tokens[1:] != alone[n].tokens[1:]],
    )


def test_retracted_requests_keep_their_bits(servers):
    assert differing(servers["launch_server"].url).all == []


def test_noise_and_penalties_go_on_after_a_retraction(servers):
    assert differing(servers["launch_server"].url, sampled=True).all == []


def test_control_stock_changes(servers):
    assert len(differing(servers["stock"].url).retracted) > 2


@pytest.mark.gpu
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_retracted_requests_keep_their_bits_on_a_gpu(on_gpu, backend):
    assert differing(on_gpu[backend].wait_ready(400).url, GPU_LENGTHS).all == []


@pytest.mark.gpu
def test_control_stock_changes_on_a_gpu(on_gpu):
    """In its deterministic mode, where neighbours change little and prefill differs from decode."""
    assert len(differing(on_gpu["stock"].wait_ready(400).url, GPU_LENGTHS).retracted) > 2
