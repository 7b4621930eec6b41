"""Requests that sample: the bits of one do not depend on its neighbours, and a seed repeats it."""

from __future__ import annotations

import json

import openai
import pytest
import requests

import sampled
from sampled import NEIGHBOURS, TARGETS, TIMEOUT, bits, parameters, post, prompt
from sgl_det.patches.seed_rules import of_sample

pytestmark = pytest.mark.server
TEXT = "A river carries small stones"
PARAMS = {"max_new_tokens": 12, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": TEXT}], "model": "m"}
NUCLEUS = {"temperature": 1.0, "top_p": 0.95}
# Route -> a request without a seed; its answers hold at least 8 tokens.
ROUTES = {
    "/generate": {"text": TEXT, "sampling_params": PARAMS},
    "/v1/completions": {"model": "m", "prompt": TEXT, "max_tokens": 12, "ignore_eos": True},
    "/v1/chat/completions": {**CHAT, "max_tokens": 12, "ignore_eos": True},
    "/invocations": {**CHAT, "max_tokens": 12, "ignore_eos": True, "top_k": 50},
    "/v1/responses": {"model": "m", "input": TEXT, "max_output_tokens": 14, **NUCLEUS},
    "/v1/messages": {**CHAT, "max_tokens": 12, **NUCLEUS},
    "/api/chat": {**CHAT, "options": {"num_predict": 12}},
    "/api/generate": {"model": "m", "prompt": TEXT, "options": {"num_predict": 12}},
}
FINGERPRINTED = ("/v1/completions", "/v1/chat/completions", "/invocations")
routes = pytest.mark.parametrize("route", ROUTES)


@pytest.fixture(scope="module")
def url(sgl_det_server):
    """Ours. Flushing its cache is quick once the garbage collector leaves SGLang's heap alone."""
    requests.post(f"{sgl_det_server.url}/freeze_gc", timeout=TIMEOUT)
    return sgl_det_server.url


@pytest.fixture(scope="module")
def oracle(url):
    """Each target's answer alone, on a cold cache."""
    return {name: sampled.alone(url, name) for name in TARGETS}


@pytest.mark.parametrize("name", TARGETS)
def test_neighbours_change_no_bit(url, oracle, name):
    found = {kind: sampled.beside(url, name, kind) for kind in NEIGHBOURS}
    found["mixed, with logprobs"] = sampled.beside(url, name, "mixed", logprobs=True)
    found["arriving one by one"] = sampled.joined(url, name, "mixed")
    assert not [case for case, answer in found.items() if answer != oracle[name]]


def test_targets_are_answers_worth_comparing(oracle):
    assert all(len(set(tokens)) > 8 for tokens, _, _ in oracle.values())
    assert len({tokens for tokens, _, _ in oracle.values()}) == len(TARGETS)


def test_control_stock_does_not_repeat_itself(stock_server):
    """Its seeds hold in its deterministic mode alone, which knows no CPU."""
    assert sampled.alone(stock_server.url, "plain") != sampled.alone(stock_server.url, "plain")


@pytest.mark.parametrize("name", ["plain", "top_k-1", "greedy"])
def test_a_rescored_answer_has_its_bits(url, name):
    """Temperature 1, and greedy at any: what is told of a token is what its prefill tells."""
    how = {"plain": TARGETS["plain"], "top_k-1": TARGETS["warm-greedy"], "greedy": {}}[name]
    params = {**PARAMS, "sampling_seed": 4, **(how or {"temperature": 0})}
    ask = {"return_logprob": True, "top_logprobs_num": 3}
    body = {"input_ids": prompt(name), "sampling_params": params, **ask}
    told = post(url, "/generate", body)
    sampled.flush(url)
    again = {
        "input_ids": prompt(name) + told["output_ids"],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.3, "sampling_seed": 1},
        "logprob_start_len": len(prompt(name)) - 1,
    }
    meta = post(url, "/generate", {**again, **ask})["meta_info"]
    rows = [row[:2] for row in meta["input_token_logprobs"][1:]]
    assert rows == [row[:2] for row in told["meta_info"]["output_token_logprobs"]]
    assert meta["input_top_logprobs"][1:] == told["meta_info"]["output_top_logprobs"]


def events(route, body):
    """The answer's objects: one, or those of a stream."""
    answer = requests.post(route, json=body, timeout=TIMEOUT)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def words(route, found):
    """The text of an answer, joined where it was streamed."""
    last = found[-1]
    if route == "/generate":
        return last["text"]
    if route == "/v1/responses":
        last = last.get("response", last)
        return last["output"][0]["content"][0]["text"]
    if route.startswith("/api"):
        return "".join(x.get("response") or x.get("message", {}).get("content", "") for x in found)
    if route == "/v1/messages":
        if last["type"] == "message":
            return last["content"][0]["text"]
        return "".join(x["delta"].get("text", "") for x in found if "delta" in x)
    choices = [c for x in found for c in x["choices"]]
    parts = [c.get("message") or c.get("delta") or {"content": c.get("text")} for c in choices]
    return "".join(part.get("content") or "" for part in parts)


def same(route, found, whole):
    """Whether a text is another one; SGLang's streams on Ollama's routes lose its last part."""
    return whole.startswith(found) and found if route.startswith("/api") else found == whole


def seeds_of(route, found):
    if route == "/generate":
        return [found[-1]["meta_info"]["sampling_seed"]]
    return [seed for x in found if "sglext" in x for seed in x["sglext"]["sampling_seeds"]]


@routes
def test_seeds_repeat_an_answer_on_every_route(url, route):
    def ask(name="seed", seed=5, **other):
        found = events(url + route, {**ROUTES[route], "stream": False, name: seed, **other})
        assert seeds_of(route, found) == [seed]
        return words(route, found)

    mine = ask()
    assert ask() == ask("sampling_seed") == mine
    assert same(route, ask(stream=True), mine)
    assert len({mine, *(ask(seed=seed) for seed in (0, -1, 2**63 - 1, 6))}) == 5


@routes
def test_an_answer_tells_the_seed_that_repeats_it(url, route):
    body = {**ROUTES[route], "stream": False}
    (first, second) = (events(url + route, body) for _ in range(2))
    streamed = events(url + route, {**body, "stream": True})
    assert len({words(route, found) for found in (first, second, streamed)}) == 3
    for found in (first, streamed):
        (seed,) = seeds_of(route, found)
        again = words(route, events(url + route, {**body, "seed": seed}))
        assert same(route, words(route, found), again)


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
def test_openais_client_repeats_answers_by_their_seeds(url, chat):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=TIMEOUT)
    usual = {"model": "m", "max_tokens": 12, "temperature": 1.0, "extra_body": {"ignore_eos": True}}

    def ask(seed):
        if chat:
            found = client.chat.completions.create(seed=seed, messages=CHAT["messages"], **usual)
            return found.choices[0].message.content, found.system_fingerprint
        found = client.completions.create(seed=seed, prompt=TEXT, **usual)
        return found.choices[0].text, found.system_fingerprint

    answers = [ask(seed) for seed in range(5)]
    assert len({text for text, _ in answers}) == 5 and len({key for _, key in answers}) == 1
    assert [ask(seed) for seed in range(5)] == answers


@pytest.mark.parametrize("route", FINGERPRINTED)
@pytest.mark.parametrize("stream", [False, True])
def test_the_fingerprint_is_the_numerics_key(url, route, stream):
    key = requests.get(f"{url}/determinism", timeout=TIMEOUT).json()["key"]
    found = events(url + route, {**ROUTES[route], "stream": stream})
    assert found and {x["system_fingerprint"] for x in found} == {key}


def test_seeds_of_a_batch(url):
    """One seed for all prompts, one a prompt, or none; and the other name of a parameter."""
    seeded = {"seed": 5, "sampling_params": PARAMS}
    alone = [post(url, "/generate", {"text": text, **seeded}) for text in "ab"]
    params = [{**PARAMS, "seed": 5}, {**PARAMS, "sampling_seed": 5}]
    for body in (seeded, {"sampling_params": params}):
        found = post(url, "/generate", {"text": ["a", "b"], **body})
        assert [x["output_ids"] for x in found] == [x["output_ids"] for x in alone]
    fresh = post(url, "/generate", {"text": ["a", "a"], "sampling_params": PARAMS})
    assert len({x["meta_info"]["sampling_seed"] for x in fresh}) == 2
    assert len({x["text"] for x in fresh}) == 2


def test_samples_are_requests_with_derived_seeds(url):
    body = {"input_ids": prompt("n"), "return_logprob": True, "top_logprobs_num": 3}
    params = {**parameters("filters"), "sampling_seed": 77}
    found = post(url, "/generate", {**body, "sampling_params": {**params, "n": 8}})
    assert [x["meta_info"]["sampling_seed"] for x in found] == [of_sample(77, i) for i in range(8)]
    assert len({bits(x) for x in found}) == 8
    for answer in found:
        params["sampling_seed"] = answer["meta_info"]["sampling_seed"]
        sampled.flush(url)
        assert bits(post(url, "/generate", {**body, "sampling_params": params})) == bits(answer)


def test_samples_of_two_prompts_on_an_openai_route(url):
    body = {"model": "m", "max_tokens": 12, "ignore_eos": True, "top_p": 0.9}
    (found,) = events(f"{url}/v1/completions", {**body, "prompt": ["a", "b"], "n": 2, "seed": 3})
    assert found["sglext"]["sampling_seeds"] == [3, of_sample(3, 1)] * 2
    for i, choice in enumerate(found["choices"]):
        one = {**body, "prompt": "ab"[i // 2], "seed": of_sample(3, i % 2)}
        (again,) = events(f"{url}/v1/completions", one)
        assert again["choices"][0]["text"] == choice["text"]


def test_default_seeds_follow_from_the_content(url, restarted_server):
    """With --det-default-seed; without it two answers differ."""
    body = {"text": TEXT, "sampling_params": PARAMS}
    other = {"text": TEXT, "sampling_params": {**PARAMS, "top_p": 0.99}}
    one, two, three = (post(restarted_server.url, "/generate", x) for x in (body, body, other))
    assert one["output_ids"] == two["output_ids"] != three["output_ids"]
    assert one["meta_info"]["sampling_seed"] == two["meta_info"]["sampling_seed"]
    named = {**body, "seed": one["meta_info"]["sampling_seed"]}
    assert post(url, "/generate", named)["output_ids"] == one["output_ids"]


def test_a_response_in_the_background_has_to_name_its_seed(url):
    body = {**ROUTES["/v1/responses"], "background": True}
    answer = requests.post(f"{url}/v1/responses", json=body, timeout=TIMEOUT)
    assert answer.status_code == 400 and "seed" in answer.text
