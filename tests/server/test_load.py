"""200 mixed requests at once, on every route: one request keeps its bits before and during them."""

from __future__ import annotations

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

pytestmark = pytest.mark.server
MANY = 200
SUBJECT = {
    "input_ids": list(range(40, 77)),
    "sampling_params": {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True},
    "return_logprob": True,
    "top_logprobs_num": 3,
}


def _bits(url: str) -> str:
    meta = requests.post(f"{url}/generate", json=SUBJECT, timeout=300).json()["meta_info"]
    kept = ("output_token_logprobs", "output_top_logprobs")
    return json.dumps([meta[k] for k in kept])


def _mixed(i: int) -> tuple[str, dict]:
    """One of many requests: another route, length, and way of sampling each time."""
    rng = random.Random(i)
    new = rng.choice((1, 2, 5, 9))
    how = rng.choice(
        ({"temperature": 0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.2, "top_k": 9})
    )
    text = "".join(rng.choices("abcdefgh ", k=rng.choice((1, 7, 30, 90))))
    ids = [rng.randrange(256) for _ in range(rng.choice((1, 15, 16, 17, 64, 130)))]
    openai = {"model": "m", "max_tokens": new, "temperature": how["temperature"]}
    chat = [{"role": "user", "content": text}]
    return (
        ("/generate", {"text": text, "sampling_params": how | {"max_new_tokens": new}}),
        ("/generate", {"input_ids": ids, "sampling_params": how | {"max_new_tokens": new}}),
        ("/v1/completions", openai | {"prompt": text, "logprobs": 2}),
        ("/v1/completions", openai | {"prompt": ids, "stream": True}),
        ("/v1/chat/completions", openai | {"messages": chat, "stream": bool(i % 2)}),
    )[i % 5]


def _under_load(url: str, many: int) -> tuple[str, set[str]]:
    """The subject's bits before, and every set of bits that it had during and after."""
    before, found = _bits(url), []
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            found.append(_bits(url))

    def send(i: int) -> int:
        route, body = _mixed(i)
        return requests.post(url + route, json=body, timeout=300).status_code

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(many) as pool:
        statuses = list(pool.map(send, range(many)))
    ended.set()
    watcher.join()
    assert statuses == [200] * many
    return before, {*found, _bits(url)}


def test_bits_do_not_change_under_200_mixed_requests(sgl_det_server):
    before, during = _under_load(sgl_det_server.url, MANY)
    assert during == {before}


def test_control_stock_changes_under_load(stock_server):
    before, during = _under_load(stock_server.url, 40)
    assert during != {before}
