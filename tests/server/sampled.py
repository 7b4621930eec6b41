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
# And every way to filter, at every warmth, with everything else that changes logits.
_FILTERS = {"": {}, "top_k": {"top_k": 30}, "top_p": {"top_p": 0.85}, "min_p": {"min_p": 0.03}}
_FILTERS["all"] = _FILTERS["top_k"] | _FILTERS["top_p"] | _FILTERS["min_p"]
_OTHERS = {"": {}, "bias": TARGETS["bias"], "least": TARGETS["least"]}
_OTHERS["penalties"] = TARGETS["penalties"] | {"repetition_penalty": 1.1}
EVERY_TARGET = TARGETS | {
    f"{warmth} {one} {other}": {**_OTHERS[other], "top_p": 1.0, **_FILTERS[one]}
    | {"temperature": warmth}
    for warmth in (0.6, 1.0, 1.5)
    for one in _FILTERS
    for other in _OTHERS
}
# Neighbourhood -> the parameters of its requests, by number.
NEIGHBOURS: dict[str, Any] = {
    "greedy": lambda i: {"temperature": 0.0},
    "top_p": lambda i: {"temperature": 1.0, "top_p": 0.8},
    "mixed": lambda i: [*TARGETS.values()][(3 * i + 1) % len(TARGETS)],
    "with grammars": lambda i: {"temperature": 1.0, "regex": "[a-f]{30}", "max_new_tokens": 20},
}
MORE_NEIGHBOURS: dict[str, Any] = {
    "top_k": lambda i: {"temperature": 1.0, "top_k": 5 + i},
    "min_p": lambda i: {"temperature": 1.0, "min_p": 0.1},
    "unfiltered": lambda i: {"temperature": 1.0},
    "penalties": lambda i: {"temperature": 0.0, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    "ending early": lambda i: {"temperature": 1.0, "max_new_tokens": 1 + i},
    "crowd": NEIGHBOURS["mixed"],
}
SIZES = {"greedy": 3, "top_p": 1, "mixed": 15, "with grammars": 2}
SIZES |= {"top_k": 7, "min_p": 2, "unfiltered": 31, "penalties": 3, "ending early": 8, "crowd": 63}


def prompt(name: str, length: int = 24) -> list[int]:
    rng = random.Random(name)
    return [rng.randrange(256) for _ in range(length)]


def parameters(name: str) -> dict[str, Any]:
    seed = random.Random(f"seed of {name}").getrandbits(63) - 2**62
    return {"max_new_tokens": NEW, "ignore_eos": True, "sampling_seed": seed, **EVERY_TARGET[name]}


def neighbour(kind: str, i: int) -> dict[str, Any]:
    seed = random.Random(f"{kind} {i}").getrandbits(40)
    ends = {"max_new_tokens": 6 + 5 * i % 26, "ignore_eos": True, "sampling_seed": seed}
    return {**ends, **(NEIGHBOURS | MORE_NEIGHBOURS)[kind](i)}


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


def while_aborted(url: str, name: str) -> tuple:
    """The target beside requests that are aborted."""
    flush(url)
    rids = [f"{name} {i}" for i in range(3)]

    def begin(i: int) -> None:
        params = {**neighbour("mixed", i), "max_new_tokens": 200}
        body = {"rid": rids[i], "input_ids": prompt(f"aborted {i}"), "sampling_params": params}
        requests.post(f"{url}/generate", json=body, timeout=TIMEOUT)

    threads = [threading.Thread(target=begin, args=(i,)) for i in range(len(rids))]
    for thread in threads:
        thread.start()
    end = threading.Timer(0.1, lambda: [_abort(url, rid) for rid in rids])
    end.start()
    found = one(url, name)
    end.join()
    for rid in rids:
        _abort(url, rid)  # of those that had not begun
    for thread in threads:
        thread.join()
    return found


def _abort(url: str, rid: str) -> None:
    requests.post(f"{url}/abort_request", json={"rid": rid}, timeout=TIMEOUT)


def every_case(url: str, name: str) -> dict[str, tuple]:
    """The answers of a target in every neighbourhood there is."""
    found = {kind: beside(url, name, kind) for kind in NEIGHBOURS | MORE_NEIGHBOURS}
    found["mixed, with logprobs"] = beside(url, name, "mixed", logprobs=True)
    found["arriving one by one"] = joined(url, name, "mixed")
    found["aborted"] = while_aborted(url, name)
    found["after all others, on a warm cache"] = one(url, name)
    return found
