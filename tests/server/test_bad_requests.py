"""Bad requests are refused with a reason, and leave no trace in the bits of good ones."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request

import pytest

from bad_requests import BAD_REQUESTS, PROMPT, BadRequest

pytestmark = pytest.mark.server
TIMEOUT = 60  # seconds; a request that hangs is a failure


def _send(url: str, route: str, body: bytes, content_type: str = "application/json"):
    """Status and text of the answer; (0, the reason) if there is none."""
    headers = {"content-type": content_type}
    request = urllib.request.Request(url + route, body, headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def _bits(url: str) -> list[list]:
    """Tokens and the bits of their logprobs: greedy, sampled and rescored, on a cold cache."""
    _send(url, "/flush_cache", b"")
    params = ({"temperature": 0}, {"temperature": 1.0, "sampling_seed": 7})
    found = []
    for one in params:
        body = {
            "text": [PROMPT, "Another prompt, " * 8],
            "sampling_params": {"max_new_tokens": 8, "ignore_eos": True, **one},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        status, text = _send(url, "/generate", json.dumps(body).encode())
        assert status == 200, text
        for answer in json.loads(text):
            meta = answer["meta_info"]
            rows = meta["input_token_logprobs"] + meta["output_token_logprobs"]
            found.append([(t, None if p is None else float(p).hex()) for p, t, _ in rows])
    return found


def _problem(url: str, bad: BadRequest) -> str | None:
    """What is wrong with the answer to a bad request, or None."""
    status, text = _send(url, bad.route, bad.body, bad.content_type)
    shown = f"{bad.name}: {status} {text[:300]}"
    if not 400 <= status < 500:
        return shown
    try:
        json.loads(text)
    except ValueError:
        return f"not JSON: {shown}"
    if bad.reason.lower() not in text.lower():
        return f"reason without {bad.reason!r}: {shown}"
    return f"reason of {len(text)} characters: {shown}" if len(text) > 4000 else None


@pytest.fixture(scope="module")
def bits_before(sgl_det_server):
    return _bits(sgl_det_server.url)


def test_there_are_many_and_their_names_differ():
    names = [bad.name for bad in BAD_REQUESTS]
    assert len(names) >= 50 and len(names) == len(set(names))


def test_each_is_refused_with_a_reason_and_bits_stay(sgl_det_server, bits_before):
    url = sgl_det_server.url
    problems = [p for bad in BAD_REQUESTS if (p := _problem(url, bad))]
    assert not problems, "\n".join(problems)
    assert _bits(url) == bits_before


def test_good_requests_beside_bad_ones_keep_their_bits(sgl_det_server, bits_before):
    url = sgl_det_server.url
    statuses: list[int] = []

    def flood(part):
        statuses.extend(_send(url, b.route, b.body, b.content_type)[0] for b in part)

    # Control requests stop the scheduler for a moment, and some of them flush the cache.
    refused = [b for b in BAD_REQUESTS if b.route in ("/generate", "/v1/completions")]
    threads = [threading.Thread(target=flood, args=(refused[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    during = []
    while any(thread.is_alive() for thread in threads):
        during.append(_bits(url))
    for thread in threads:
        thread.join()
    during.append(_bits(url))
    assert len(statuses) == len(refused) and all(400 <= s < 500 for s in statuses)
    assert all(bits == bits_before for bits in during)


def test_a_request_id_in_use_is_refused_and_its_owner_goes_on(sgl_det_server):
    url = sgl_det_server.url
    params = {"max_new_tokens": 64, "temperature": 0, "ignore_eos": True}
    body = json.dumps({"text": PROMPT, "rid": "mine", "sampling_params": params}).encode()
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(_send(url, "/generate", body)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statuses = sorted(status for status, _ in answers)
    assert statuses[0] == 200 and set(statuses) <= {200, 400}
    assert all("mine" in text for _, text in answers)
    assert len({json.loads(t)["text"] for s, t in answers if s == 200}) == 1


def test_token_ids_logprob_beside_a_request_without_it(sgl_det_server):
    body = {
        "text": ["a", "b"],
        "sampling_params": {"max_new_tokens": 3, "ignore_eos": True},
        "return_logprob": [True, False],
        "token_ids_logprob": [[1], [2]],
    }
    status, text = _send(sgl_det_server.url, "/generate", json.dumps(body).encode())
    assert status == 200 and len(json.loads(text)) == 2


GOOD = [
    ("/generate", {"text": "x", "sampling_params": {"n": None, "max_new_tokens": 2.0}}),
    ("/generate", {"text": "x", "sampling_params": {"sampling_seed": -(2**63), "top_k": None}}),
    ("/generate", {"text": "x", "sampling_params": {"stop_token_ids": [1, None], "stop": "q"}}),
    ("/generate", {"text": "x", "sampling_params": {"logit_bias": {"5": -1e38}}}),
    ("/generate", {"text": ["x", "y"], "sampling_params": {"n": 2}, "rid": ["good-1", "good-2"]}),
    ("/generate", {"text": "x", "image_data": [], "return_logprob": True, "logprob_start_len": 1}),
    ("/generate", {"text": "x", "sampling_params": {"json_schema": '{"type": "integer"}'}}),
    ("/v1/completions", {"model": "m", "prompt": [[1, 2], [3]], "max_tokens": 2, "stream": True}),
    ("/api/generate", {"model": "m", "prompt": "x", "stream": False,
                       "options": {"num_predict": 2, "seed": 4}}),
    ("/api/chat", {"model": "m", "messages": [{"role": "user", "content": "x"}],
                   "stream": False, "options": {"num_predict": 2}}),
    ("/v1/messages", {"model": "m", "max_tokens": 2, "stream": True,
                      "messages": [{"role": "user", "content": "x"}]}),
]  # fmt: skip


@pytest.mark.parametrize("route, body", GOOD, ids=lambda v: v if isinstance(v, str) else "")
def test_good_requests_pass(sgl_det_server, route, body):
    status, text = _send(sgl_det_server.url, route, json.dumps(body).encode())
    assert status == 200 and '"error":{' not in text, text
