"""Requests that bring a logit processor: their own tokens, and their own errors."""

from __future__ import annotations

import json
import threading
from types import FunctionType

import dill
import pytest
import requests

import sampled
from sampled import TIMEOUT, bits, parameters, post, prompt

pytestmark = pytest.mark.server


def code(made):
    """As SGLang's clients send it; by value, as the server cannot import this file."""
    alone = FunctionType(made.__code__, {"__builtins__": __builtins__})
    alone.__module__ = "__main__"
    return json.dumps({"callable": dill.dumps(alone, recurse=True).hex()})


def banning():
    """Bans the ids that its own request names."""

    def process(logits, parameters):
        assert len(parameters) == 1
        logits[..., parameters[0]["token_ids"]] = -float("inf")
        return logits

    return process


def looking_back():
    """Follows from the tokens so far: each is banned once it was seen, the last one favoured."""

    def process(logits, parameters):
        seen = list(parameters[0]["__req__"].output_ids)
        logits[0, seen] = -float("inf")
        logits[0, (sum(seen) + len(seen)) % 256] += 2.0
        return logits

    return process


def counting():
    """Follows from how often it was called."""
    calls = []

    def process(logits, _):
        calls.append(1)
        logits[0, 3 * len(calls) % 256] += 5.0
        return logits

    return process


def failing():
    def process(logits, _):
        raise RuntimeError("on purpose")

    return process


BODIES = {
    "one ban": (banning, {"token_ids": list(range(0, 320, 2))}),
    "another": (banning, {"token_ids": list(range(1, 320, 2))}),
    "looking back": (looking_back, None),
    "counting": (counting, None),
}


def body(name):
    made, custom = BODIES[name]
    params = {**parameters("filters"), "max_new_tokens": 24, "custom_params": custom}
    asked = {"input_ids": prompt(name, 700), "sampling_params": params}
    asked |= {"custom_logit_processor": code(made), "return_logprob": True, "top_logprobs_num": 3}
    return asked


@pytest.fixture(scope="module")
def url(restarted_server):
    return restarted_server.url


@pytest.fixture(scope="module")
def oracle(url):
    found = {}
    for name in BODIES:
        sampled.flush(url)
        found[name] = bits(post(url, "/generate", body(name)))
    return found


def test_neighbours_with_other_wishes_change_no_bit(url, oracle):
    found = {}

    def ask(name):
        found[name] = bits(post(url, "/generate", body(name)))

    for warm in (False, True):
        found.clear()
        if not warm:
            sampled.flush(url)
        threads = [threading.Thread(target=ask, args=(name,)) for name in BODIES]
        threads.append(threading.Thread(target=sampled.one, args=(url, "penalties")))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == oracle, f"warm: {warm}"


def test_processors_do_what_they_say(oracle):
    assert all(token % 2 for token in oracle["one ban"][0])
    assert not any(token % 2 for token in oracle["another"][0])
    assert len(set(oracle["looking back"][0])) == 24
    assert len({tokens for tokens, _, _ in oracle.values()}) == len(BODIES)


@pytest.mark.parametrize("text", [code(failing), "x", "{}", '{"callable": "00"}'])
def test_an_error_is_the_requests_own(url, oracle, text):
    bad = body("looking back") | {"custom_logit_processor": text}
    for stream in (False, True):
        answer = requests.post(f"{url}/generate", json=bad | {"stream": stream}, timeout=TIMEOUT)
        assert "custom_logit_processor failed" in answer.text
        assert stream or answer.status_code == 400, answer.text
    assert bits(post(url, "/generate", body("one ban"))) == oracle["one ban"]
