"""``GET /determinism``: what it tells, its header, and what changes the key."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from faults import plugin, scheduler_of
from sgl_det.axis import Axis
from sgl_det.make_model import make_model
from sgl_det.server_process import ServerProcess
from support import API_KEY, CPU, arguments

pytestmark = pytest.mark.server
HEADER = "x-sgl-det-key"


def get(server, path="/determinism", **kwargs):
    return requests.get(server.url + path, timeout=120, **kwargs)


def reference(server) -> list[tuple[int, str]]:
    """Tokens and logprob bits of one greedy request with an empty cache."""
    requests.post(f"{server.url}/flush_cache", timeout=60)
    body = {
        "input_ids": [(7 * i * i + 3) % 256 for i in range(150)],
        "sampling_params": {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True},
        "return_logprob": True,
    }
    answer = requests.post(f"{server.url}/generate", json=body, timeout=300)
    answer.raise_for_status()
    found = answer.json()["meta_info"]["output_token_logprobs"]
    return [(token, float(logprob).hex()) for logprob, token, *_ in found]


def test_tells_what_holds(sgl_det_server):
    answer = get(sgl_det_server).json()
    assert answer["backend"] == "torch_native"
    assert all(p["holds"] for p in answer["patches"]) and len(answer["patches"]) > 5
    assert set(answer["claims"]) | set(answer["not_claimed"]) == {a.value for a in Axis}
    assert {"weights", "torch", "sglang", "dtype", "threads"} <= set(answer["numerics"])
    assert answer["kernels"] and answer["lifted"] == [] and answer["problem"] is None


def test_key_is_in_every_header(sgl_det_server):
    key = get(sgl_det_server).json()["key"]
    for path in ("/health", "/v1/models", "/no/such/path"):
        assert get(sgl_det_server, path).headers[HEADER] == key


def test_stock_has_no_such_endpoint(stock_server):
    answer = get(stock_server)
    assert answer.status_code == 404 and HEADER not in answer.headers


def mixed(url: str, i: int) -> int:
    """One of several kinds of request; returns its status."""
    tokens = {"max_new_tokens": 4 + i % 13, "ignore_eos": True}
    kinds = (
        ("/generate", {"text": "x" * (1 + 17 * i % 700), "sampling_params": tokens}),
        (
            "/generate",
            {
                "input_ids": [(i * j + 5) % 256 for j in range(1 + 31 * i % 900)],
                "sampling_params": {**tokens, "temperature": 0.8, "sampling_seed": i},
                "return_logprob": i % 2 == 0,
            },
        ),
        (
            "/v1/completions",
            {"model": "m", "prompt": f"count {i}", "max_tokens": 9, "temperature": i % 2},
        ),
        (
            "/v1/chat/completions",
            {
                "model": "m",
                "messages": [{"role": "user", "content": f"hello {i}"}],
                "max_tokens": 7,
                "stream": i % 3 == 0,
            },
        ),
    )
    path, body = kinds[i % len(kinds)]
    return requests.post(url + path, json=body, timeout=300).status_code


def test_two_hundred_mixed_requests_leave_the_bits(sgl_det_server):
    before = reference(sgl_det_server)
    with ThreadPoolExecutor(32) as pool:
        statuses = list(pool.map(lambda i: mixed(sgl_det_server.url, i), range(200)))
    assert set(statuses) == {200}
    assert reference(sgl_det_server) == before


def test_openai_routes_answer(sgl_det_server):
    chat = requests.post(
        f"{sgl_det_server.url}/v1/chat/completions",
        json={"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
        timeout=120,
    )
    assert chat.status_code == 200 and chat.json()["usage"]["completion_tokens"] > 0


# A plugin that takes one of our patches away when it is told to.
UNPATCH = """
import signal

def unpatch(*_):
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod as C
    C.apply = C.apply.__wrapped__

def register():
    import multiprocessing
    if multiprocessing.parent_process() is not None:
        signal.signal(signal.SIGUSR2, unpatch)
"""


@pytest.fixture(scope="module")
def other_server(demo_model, tmp_path_factory):
    """A server of its own, for what would disturb the others: keys, updates, a hostile plugin."""
    folder = tmp_path_factory.mktemp("other")
    argv, env = (*arguments(demo_model), "--api-key", API_KEY), plugin(folder / "plugin", UNPATCH)
    server = ServerProcess("sgl_det.launch_server", argv, log=folder / "log", env=CPU | env)
    with server:
        yield server


AUTH = {"headers": {"Authorization": f"Bearer {API_KEY}"}}


def test_endpoint_is_behind_the_api_key(other_server):
    assert get(other_server).status_code == 401
    assert get(other_server, **AUTH).status_code == 200


def test_secrets_are_masked_in_the_log(other_server):
    shown = [x for x in other_server.log.read_text().splitlines() if x.startswith("sgl_det:")]
    assert shown and not any(API_KEY in x for x in shown)


def test_weight_update_renews_the_digest(other_server, demo_model, tmp_path: Path):
    """And what the old weights left in the prefix cache is gone."""
    ask = {"input_ids": [*range(40)], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}

    def answered():
        url = f"{other_server.url}/generate"
        found = requests.post(url, json=ask | {"return_logprob": True}, timeout=120, **AUTH).json()
        meta = found["meta_info"]
        return meta["cached_tokens"], meta["output_token_logprobs"]

    before, (_, first) = get(other_server, **AUTH).json(), answered()
    assert answered()[0] > 0
    changed = make_model("demo", tmp_path / "changed", seed=1)

    def update(path):
        answer = requests.post(
            f"{other_server.url}/update_weights_from_disk",
            json={"model_path": str(path)},
            timeout=300,
            **AUTH,
        )
        assert answer.status_code == 200, answer.text
        return answer

    answer = update(changed)
    after = get(other_server, **AUTH).json()
    assert after["numerics"]["weights"] != before["numerics"]["weights"]
    assert after["key"] != before["key"]
    assert answer.headers[HEADER] == after["key"]
    cached, other = answered()
    assert cached == 0 and other != first
    update(demo_model)
    assert answered() == (0, first)
    assert get(other_server, **AUTH).json()["key"] == before["key"]


def test_unpatching_in_the_worker_is_seen(other_server):
    assert get(other_server, **AUTH).json()["claims"]
    scheduler_of(other_server).send_signal(signal.SIGUSR2)
    for _ in range(50):
        answer = get(other_server, **AUTH).json()
        if answer["problem"]:
            break
    lost = [p for p in answer["patches"] if not p["holds"]]
    assert [p["target"].rpartition(".")[2] for p in lost] == ["apply"]
    assert answer["claims"] == [] and "apply" in answer["problem"]
