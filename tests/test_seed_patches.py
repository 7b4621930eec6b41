"""Which seed a request has, how its samples get theirs, and how an answer tells them."""

from __future__ import annotations

import asyncio
import json
from array import array
from types import SimpleNamespace

import msgspec
import pytest

from sgl_det.check import FITS, judge_all
from sgl_det.patches import marks, seed_rules, seeds
from sgl_det.patches.seeds import TOLD


@pytest.fixture
def default(monkeypatch):
    monkeypatch.setattr(seed_rules.SETTINGS, "default", 5)


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63 - 1, 7.0, None])
def test_seeds_are_signed_64_bit_integers(seed):
    assert seed_rules.checked("seed", seed) == seed


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 1.5, True, "7", [1], float("nan"), 1e300])
def test_others_are_refused_by_the_field_that_holds_them(seed):
    with pytest.raises(ValueError, match="options.seed is .*expected a 64-bit signed integer"):
        seed_rules.checked("options.seed", seed)


def test_a_seed_may_be_given_twice_but_not_two():
    assert seed_rules.one_of([("seed", 4), ("sampling_seed", None), ("other", 4)]) == 4
    with pytest.raises(ValueError, match="seed is 0 and other is 4; give one"):
        seed_rules.one_of([("seed", 0), ("other", 4)])


def test_samples_have_seeds_that_differ_and_the_first_has_the_requests():
    made = [seed_rules.of_sample(9, i) for i in range(1000)]
    assert made[0] == 9 and len({*made, *(seed_rules.of_sample(10, i) for i in range(9))}) == 1009
    assert all(0 <= seed < 2**53 for seed in made)
    # Frozen: answers that were told these seeds have to be repeated by later versions.
    assert made[1:3] == [4868417298881122, 3148966583782732]


def test_fresh_seeds_differ():
    made = {seed_rules.made_up([1], {}) for _ in range(100)}
    assert len(made) == 100 and all(0 <= seed < 2**53 for seed in made)


def test_default_seeds_follow_the_content_alone(default):
    params = {"temperature": 1.0, "logit_bias": {"4": 1.0, "10": 2.0}, "stop_token_ids": {7, 3}}
    mine = seed_rules.made_up([1, 2], params)
    again = {**params, "n": 3, "sampling_seed": None, "logit_bias": {"10": 2.0, "4": 1.0}}
    assert seed_rules.made_up([1, 2], again) == mine
    others = [
        seed_rules.made_up([1, 3], params),
        seed_rules.made_up([1, 2], {**params, "temperature": 0.9}),
    ]
    seed_rules.SETTINGS.default = 6
    others.append(seed_rules.made_up([1, 2], params))
    assert len({mine, *others}) == 4


class Params(msgspec.Struct):
    """The part of SGLang's sampling parameters that seeds follow from."""

    temperature: float = 1.0
    sampling_seed: int | None = None


def settled(given=None, prompt=(1, 2)):
    obj = SimpleNamespace(sampling_params={"temperature": 1.0})
    message = SimpleNamespace(
        sampling_params=Params(sampling_seed=given), input_embeds=None, input_ids=array("q", prompt)
    )
    shared = obj.sampling_params
    seeds.settle(obj, message)
    assert "sampling_seed" not in shared
    assert obj.sampling_params["sampling_seed"] == message.sampling_params.sampling_seed
    return message.sampling_params.sampling_seed


def test_a_request_keeps_its_seed_or_gets_one(default):
    assert settled(0) == 0
    assert settled() == settled() != settled(prompt=(2, 1))


class Manager:
    """The part of SGLang's manager that the patches of seeds are put around."""

    def __init__(self) -> None:
        self.sent = []
        self.rid_to_state = {"mine": SimpleNamespace(obj=request("mine"))}

    def _init_child_req_state(self, logical_rid, obj, request=None):
        self.rid_to_state[obj.rid] = SimpleNamespace(obj=obj)

    def _send_one_request(self, message):
        self.sent.append(message.sampling_params.sampling_seed)

    async def _wait_one_response(self, obj, request=None):
        yield {"meta_info": {"id": obj.rid}}


def request(rid):
    return SimpleNamespace(rid=rid, sampling_params={"sampling_seed": 9})


def test_samples_are_sent_and_told_with_their_seeds():
    manager, http, told = Manager(), SimpleNamespace(scope={}), []
    begin = seeds._sampling(Manager._init_child_req_state)
    send, wait = (
        seeds._sending(Manager._send_one_request),
        seeds._telling(Manager._wait_one_response),
    )
    shared = Params(sampling_seed=9)
    for rid in ("cache", "0", "1", "2"):
        child = request(rid)
        begin(manager, "mine", child)
        send(manager, SimpleNamespace(rid=rid, sampling_params=shared))
        told.append(wait(manager, child, http))

    async def first(answers):
        return (await anext(answers))["meta_info"]["sampling_seed"]

    expected = [9, 9, seed_rules.of_sample(9, 1), seed_rules.of_sample(9, 2)]
    assert manager.sent == expected and shared.sampling_seed == 9
    assert [asyncio.run(first(answers)) for answers in told] == expected
    assert http.scope[TOLD] == expected[1:]


@pytest.mark.parametrize("body", [{"seed": 3}, {"sampling_seed": 3}, {"seed": 3, "stream": True}])
def test_every_route_is_asked_at_the_top_of_its_body(body):
    async def upstream(self, obj, request=None):
        yield getattr(obj, seeds.ASKED)

    async def asked(request):
        answers = seeds._asking(upstream)(None, SimpleNamespace(), request)
        return [seed async for seed in answers]

    assert asyncio.run(asked(SimpleNamespace(_json=body))) == [3]
    assert asyncio.run(asked(SimpleNamespace())) == asyncio.run(asked(None)) == [None]


MARKS = {"system_fingerprint": "k", "sglext": {"sampling_seeds": [1]}}


@pytest.mark.parametrize("prefix", [b"", b"data: "])
def test_marks_are_put_into_objects(prefix):
    line = marks.marked(prefix + b'{"id":"x"}', MARKS)
    assert json.loads(line[len(prefix) :]) == {"id": "x", **MARKS}
    line = marks.marked(prefix + b'{"sglext":{"routed_experts":"y"},"a":1}', MARKS)
    ext = {"routed_experts": "y", "sampling_seeds": [1]}
    assert json.loads(line[len(prefix) :]) == {"a": 1, **MARKS, "sglext": ext}


@pytest.mark.parametrize(
    "line", [b"data: [DONE]", b"", b"event: ping", b'data: {"error":{}}', b"[1]", b'{"a":']
)
def test_other_lines_are_left_alone(line):
    assert marks.marked(line, MARKS) is line


def sent(path, kind, bodies, told=(2,), status=200):
    """What a client gets of an answer in these bodies."""
    out = []

    async def app(scope, receive, send):
        headers = [(b"content-type", kind), (b"content-length", b"1")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for i, body in enumerate(bodies):
            if i:
                scope[TOLD] = list(told)
            more = i + 1 < len(bodies)
            await send({"type": "http.response.body", "body": body, "more_body": more})

    async def send(message):
        out.append(message)

    asyncio.run(marks.Marks(app, lambda: "k")({"type": "http", "path": path}, None, send))
    assert [m["type"] for m in out][0] == "http.response.start"
    return dict(out[0]["headers"]), [m["body"] for m in out[1:]]


def test_an_answer_in_one_piece_tells_both_and_its_new_length():
    headers, (body,) = sent("/v1/completions", b"application/json", [b'{"id":', b'"x"}'])
    seed = {"sglext": {"sampling_seeds": [2]}}
    assert json.loads(body) == {"id": "x", "system_fingerprint": "k", **seed}
    assert int(headers[b"content-length"]) == len(body)


def test_a_stream_tells_the_key_always_and_the_seeds_once():
    chunk = b'data: {"id":"x"}\n\n'
    _, bodies = sent("/v1/chat/completions", b"text/event-stream", [chunk] * 3)
    found = [json.loads(body.removeprefix(b"data: ")) for body in bodies]
    assert [x["system_fingerprint"] for x in found] == ["k"] * 3
    assert ["sglext" in x for x in found] == [False, True, False]


def test_routes_of_other_styles_tell_seeds_alone():
    _, bodies = sent("/api/chat", b"application/x-ndjson", [b'{"a":1}\n'] * 3)
    assert bodies == [b'{"a":1}\n', b'{"a":1,"sglext":{"sampling_seeds":[2]}}\n', b'{"a":1}\n']


@pytest.mark.parametrize("path, status", [("/v1/embeddings", 200), ("/v1/completions", 400)])
def test_other_routes_and_refusals_stay_as_they_are(path, status):
    bodies = [b'{"a":', b"1}"]
    headers, found = sent(path, b"application/json", bodies, status=status)
    assert found == bodies and headers[b"content-length"] == b"1"


def test_patches_fit_what_is_installed():
    assert [v for v in judge_all(seeds.patches()) if v.verdict != FITS] == []
