"""Requests that sample, in every way there is, and the neighbours that they are put beside."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import requests

NEW = 16
TIMEOUT = 120
# Target -> its sampling parameters. `seeds` gives each its own.
TARGETS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "top_k": {"temperature": 1.0, "top_k": 20},
    "top_p": {"temperature": 0.9, "top_p": 0.9},
    "min_p": {"temperature": 1.2, "min_p": 0.05},
    "filters": {"temperature": 1.1, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
    "greedy": {"temperature": 0.0},
    "warm-greedy": {"temperature": 0.7, "top_k": 1},
    "penalties": {"temperature": 0.9, "frequency_penalty": 0.7, "presence_penalty": 0.4},
    "greedy-penalties": {"temperature": 0.0, "frequency_penalty": 1.3},
    "repetition": {"temperature": 1.0, "top_k": 40, "repetition_penalty": 1.3},
    "bias": {"temperature": 1.0, "logit_bias": {"40": 3.0, "41": -5.0}, "top_p": 0.8},
    "least": {"temperature": 1.0, "min_new_tokens": 8, "ignore_eos": False},
}
# Neighbourhood -> the parameters of its requests, by number.
NEIGHBOURS: dict[str, Any] = {
    "greedy": lambda i: {"temperature": 0.0},
    "top_p": lambda i: {"temperature": 1.0, "top_p": 0.8},
    "mixed": lambda i: [*TARGETS.values()][(3 * i + 1) % len(TARGETS)],
    "with grammars": lambda i: {"temperature": 1.0, "regex": "[a-f]{30}", "max_new_tokens": 20},
}
SIZES = {"greedy": 3, "top_p": 1, "mixed": 15, "with grammars": 2}


def prompt(name: str, length: int = 24) -> list[int]:
    rng = random.Random(name)
    return [rng.randrange(256) for _ in range(length)]


def parameters(name: str) -> dict[str, Any]:
    seed = random.Random(f"seed of {name}").getrandbits(63) - 2**62
    return {"max_new_tokens": NEW, "ignore_eos": True, "sampling_seed": seed, **TARGETS[name]}


def neighbour(kind: str, i: int) -> dict[str, Any]:
    seed = random.Random(f"{kind} {i}").getrandbits(40)
    ends = {"max_new_tokens": 6 + 5 * i % 26, "ignore_eos": True, "sampling_seed": seed}
    return {**ends, **NEIGHBOURS[kind](i)}


def post(url: str, route: str, body: dict[str, Any]) -> Any:
    answer = requests.post(url + route, json=body, timeout=TIMEOUT)
    assert answer.status_code == 200, f"{route}: {answer.status_code} {answer.text[:500]}"
    return answer.json()


def flush(url: str) -> None:
    for _ in range(40):
        if requests.post(f"{url}/flush_cache?timeout=20", timeout=TIMEOUT).status_code == 200:
            return
        time.sleep(0.1)
    raise AssertionError("the cache was not flushed")


def bits(reply: dict[str, Any]) -> tuple:
    """Tokens, and the bits of their log-probabilities and of the three most likely ones'."""
    meta = reply["meta_info"]
    chosen = tuple((t, float(p).hex()) for p, t, _ in meta["output_token_logprobs"])
    top = tuple(tuple((t, float(p).hex()) for p, t, _ in k) for k in meta["output_top_logprobs"])
    return tuple(reply["output_ids"]), chosen, top


def one(url: str, name: str) -> tuple:
    body = {"input_ids": prompt(name), "sampling_params": parameters(name)}
    return bits(post(url, "/generate", {**body, "return_logprob": True, "top_logprobs_num": 3}))


def alone(url: str, name: str) -> tuple:
    flush(url)
    return one(url, name)


def beside(url: str, name: str, kind: str, *, logprobs: bool = False) -> tuple:
    """The target in one batch with neighbours, in a place that differs from case to case."""
    flush(url)
    params = [neighbour(kind, i) for i in range(SIZES[kind])]
    place = random.Random(f"{name} {kind}").randrange(len(params) + 1)
    told = [logprobs] * len(params)
    ids = [prompt(f"{kind} {i}", 5 + 7 * i % 40) for i in range(len(params))]
    ids.insert(place, prompt(name))
    params.insert(place, parameters(name))
    told.insert(place, True)
    many = [7 if logprobs else 0] * len(told)
    many[place] = 3
    body = {"input_ids": ids, "sampling_params": params, "return_logprob": told}
    return bits(post(url, "/generate", {**body, "top_logprobs_num": many})[place])


def joined(url: str, name: str, kind: str) -> tuple:
    """The target while neighbours arrive and leave one by one."""
    flush(url)

    def arrive(i: int) -> None:
        time.sleep(0.03 * i)
        params = neighbour(kind, i)
        body = {"input_ids": prompt(f"late {i}", 3 + 5 * i), "sampling_params": params}
        post(url, "/generate", body)

    threads = [threading.Thread(target=arrive, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    found = one(url, name)
    for thread in threads:
        thread.join()
    return found
