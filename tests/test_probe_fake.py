"""The probe against a make-believe server in this process: what it sees, and how it ends.

The fake answers as a function of the prompt, and can be told to let something else in: the number
of requests in flight, the prefix cache, what decode wrote there, a split of the KV, a stream.
"""

from __future__ import annotations

import asyncio
import hashlib
import json

import pytest
from aiohttp import web

from sgl_det.axis import Axis
from sgl_det.probe.client import ProbeError
from sgl_det.probe.runner import DRIVEN, probe

KEY = "0123456789ab"
VOCAB = 300
SPLIT = 200


class Fake:
    """An SGLang server whose next token depends on the tokens before it, and on `leak`."""

    def __init__(
        self, leak: str = "", claims: list[str] | None = None, die_after: int | None = None
    ):
        self.leak, self.claims, self.die_after = leak, claims, die_after
        self.seen: list[tuple[int, ...]] = []
        self.decoded_from: list[int] = []  # the position at which each of them was generated
        self.running = self.served = 0
        self.asked: list[dict] = []  # the parameters of those that run
        self.key = KEY
        self.radix = True

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/determinism", self.determinism)
        app.router.add_get("/server_info", self.info)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/flush_cache", self.flush)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/v1/completions", self.completions)
        return app

    async def determinism(self, _request):
        if self.claims is None:
            raise web.HTTPNotFound()
        found = {"key": self.key, "claims": self.claims, "not_claimed": {}}
        numerics = {"split_tokens": {"prefill": None, "decode": SPLIT}}
        return web.json_response(found | {"numerics": numerics})

    async def info(self, _request):
        limits = {"max_total_num_tokens": 9000, "max_req_input_len": 1000}
        state = {"effective_max_running_requests_per_dp": 64}
        flags = {"chunked_prefill_size": 64, "disable_radix_cache": not self.radix, "device": "cpu"}
        flags["grammar_backend"] = "none" if self.leak == "no grammar" else "xgrammar"
        return web.json_response(limits | flags | {"internal_states": [state], "version": "0.5.17"})

    async def tokenize(self, request):
        return web.json_response({"tokens": list((await request.json())["prompt"].encode())})

    async def flush(self, _request):
        self.forget()
        return web.Response()

    def forget(self):
        self.seen.clear()
        self.decoded_from.clear()

    async def generate(self, request):
        body = await request.json()
        self.served += 1
        if self.die_after is not None and self.served > self.die_after:
            request.transport.abort()
            return web.Response()
        if body.get("token_ids_logprob"):
            error = {"message": f"bad token; valid range is [0, {VOCAB})."}
            return web.json_response({"error": error}, status=400)
        self.running += 1
        bodies = _split(body)
        self.asked += (asked := [b["sampling_params"] for b in bodies])
        await asyncio.sleep(0)
        replies = [self.reply(b, len(bodies) + self.running - 1) for b in bodies]
        self.running -= 1
        self.asked = [x for x in self.asked if not any(x is mine for mine in asked)]
        headers = {"x-sgl-det-key": self.key} if self.claims is not None else {}
        if body.get("stream"):
            text = f"data: {json.dumps(replies[0])}\n\ndata: [DONE]\n\n"
            return web.Response(text=text, headers=headers)
        whole = replies if isinstance(body["sampling_params"], list) else replies[0]
        return web.json_response(whole, headers=headers)

    async def completions(self, request):
        body = await request.json()
        ids = body["prompt"] if isinstance(body["prompt"], list) else list(body["prompt"].encode())
        rows = self.decode(tuple(ids), body["max_tokens"], 0)
        probs = {"tokens": [str(t) for t, _ in rows], "token_logprobs": [p for _, p in rows]}
        choice = {"logprobs": probs | {"top_logprobs": [{str(t): p} for t, p in rows]}}
        whole = json.dumps({"choices": [choice]})
        return web.Response(
            text=f"data: {whole}\n\ndata: [DONE]\n\n" if "stream" in body else whole
        )

    def reply(self, body: dict, n: int) -> dict:
        ids = tuple(body.get("input_ids") or body["text"].encode())
        hits = [_common(ids[:-1], s) if self.radix else 0 for s in self.seen]
        cached = max(hits, default=0)
        decoded = any(h > start for h, start in zip(hits, self.decoded_from, strict=True))
        extra = {"batch": n > 1, "cache": cached > 0, "stream": body.get("stream")}
        extra["decoded"] = decoded
        mine = body["sampling_params"]
        drawn = mine["temperature"] > 0 and mine.get("top_k") != 1
        greedy = [x for x in self.asked if x["temperature"] == 0 and x is not mine]
        extra["flags"] = drawn and bool(greedy)
        extra["grammar"] = "regex" in mine and any("ebnf" in x for x in self.asked)
        start = body.get("logprob_start_len", -1)
        if start >= 0:
            extra["prefill"] = True
        rows = self.decode(
            ids, body["sampling_params"]["max_new_tokens"], bool(extra.get(self.leak))
        )
        self.seen.append(ids + tuple(t for t, _ in rows))
        self.decoded_from.append(len(ids))
        meta = {"cached_tokens": cached, "completion_tokens": len(rows)}
        if body["return_logprob"]:
            k = body["top_logprobs_num"]
            meta["output_token_logprobs"] = [[p, t, None] for t, p in rows]
            meta["output_top_logprobs"] = [
                [[p - i, t + i, None] for i in range(k)] for t, p in rows
            ]
            if start >= 0:
                leak = bool(extra.get(self.leak))
                known = [_next(ids[:i], leak) for i in range(start + 1, len(ids))]
                rows = [(ids[start + 1 + i], p) for i, (_, p) in enumerate(known)]
                meta["input_token_logprobs"] = [[None, ids[start], None]]
                meta["input_token_logprobs"] += [[p, t, None] for t, p in rows]
                tops = [[[p - i, t + i, None] for i in range(k)] for t, p in rows]
                meta["input_top_logprobs"] = [None, *tops]
        return {"output_ids": list(self.seen[-1][len(ids) :]), "meta_info": meta}

    def decode(self, ids: tuple[int, ...], n: int, leak: bool) -> list[tuple[int, float]]:
        rows = []
        for i in range(n):
            across = self.leak == "split" and i > 0 and len(ids) > SPLIT
            token, logprob = _next(ids, leak or across)
            rows.append((token, logprob))
            ids = (*ids, token)
        return rows


def _next(ids, leak) -> tuple[int, float]:
    raw = hashlib.sha256(repr((tuple(ids), bool(leak))).encode()).digest()
    return raw[0], -1.0 - int.from_bytes(raw[1:4]) / 2**24


def _split(body: dict) -> list[dict]:
    if not isinstance(body["sampling_params"], list):
        return [body]
    return [{k: v[i] for k, v in body.items()} for i in range(len(body["sampling_params"]))]


def _common(a, b) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def drive(fake: Fake, **kwargs):
    async def main():
        runner = web.AppRunner(fake.app())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        try:
            url = f"http://127.0.0.1:{port}"
            return await probe(url, progress=False, **({"quick": True} | kwargs))
        finally:
            await runner.cleanup()

    return asyncio.run(main())


ALL = [str(a) for a in Axis]


@pytest.mark.parametrize("quick", [True, False], ids=["quick", "full"])
def test_a_function_of_the_prompt_passes(quick):
    report = drive(Fake(claims=ALL), quick=quick)
    assert report.passed, report.table()
    assert {r.verdict for r in report.rows if r.driven} == {"bitwise"}
    assert (report.key, report.subject["unique_logprobs"]) == (KEY, 1)
    assert report.subject["conditions"] > 20
    assert report.total["unique_tokens"] == report.total["prompts"]
    json.dumps(report.to_json())


@pytest.mark.parametrize(
    "leak, axis",
    [
        ("batch", Axis.BATCH_SIZE),
        ("batch", Axis.POSITION_IN_BATCH),
        ("cache", Axis.PREFIX_CACHE),
        ("prefill", Axis.PREFILL_VS_DECODE),
        ("stream", Axis.STREAMING),
        ("flags", Axis.SAMPLED),
        ("grammar", Axis.STRUCTURED),
    ],
)
def test_each_leak_is_seen_on_its_axis(leak, axis):
    report = drive(Fake(leak=leak), axes=[axis, Axis.RUN_TO_RUN])
    assert report.row(axis).verdict == "diverged"
    assert report.row(axis).first.actual_logprob.startswith("-0x1")
    assert report.row(Axis.RUN_TO_RUN).verdict == "bitwise"
    assert report.key is None and not report.passed


@pytest.mark.parametrize(
    "leak, axis, case",
    [
        ("split", Axis.PREFILL_VS_DECODE, f"rescored across {SPLIT}"),
        ("decoded", Axis.PREFIX_CACHE, "turn 2 after 61 and 8 generated"),
    ],
)
def test_leaks_at_an_edge_are_seen(leak, axis, case):
    report = drive(Fake(leak=leak, claims=ALL), axes=[axis, Axis.BATCH_SIZE], quick=False)
    assert report.row(axis).first.case == case
    assert report.row(Axis.BATCH_SIZE).verdict == "bitwise"
    assert report.server["edges"] == [64, 128, SPLIT, 2 * SPLIT]


def test_what_does_not_begin_in_time_is_left_out_and_said():
    axes = [Axis.RUN_TO_RUN, Axis.STREAMING]
    report = drive(Fake(claims=ALL), axes=axes, limit_s=0.0)
    assert {report.row(a).verdict for a in axes} == {"not tested"} and not report.passed
    assert report.row(Axis.RUN_TO_RUN).note == "6 cases left out, the time was over"


def test_an_axis_that_is_not_claimed_may_diverge():
    claims = [a for a in ALL if a != Axis.PREFIX_CACHE]
    report = drive(Fake("cache", claims), axes=[Axis.PREFIX_CACHE, Axis.RUN_TO_RUN])
    row = report.row(Axis.PREFIX_CACHE)
    assert (row.verdict, row.claimed, report.passed) == ("diverged", False, True)


def test_without_a_prefix_cache_its_axis_is_not_tested():
    fake = Fake(claims=ALL)
    fake.radix = False
    report = drive(fake, axes=[Axis.PREFIX_CACHE, Axis.RUN_TO_RUN])
    row = report.row(Axis.PREFIX_CACHE)
    assert (row.verdict, row.requests, row.note) == ("not tested", 0, "the prefix cache is off")
    assert report.passed


def test_without_a_grammar_backend_its_axis_is_not_tested():
    report = drive(Fake("no grammar", ALL), axes=[Axis.STRUCTURED, Axis.SAMPLED])
    row = report.row(Axis.STRUCTURED)
    assert (row.verdict, row.note) == ("not tested", "the server has no grammar backend")
    assert report.row(Axis.SAMPLED).verdict == "bitwise" and report.passed


def test_min_p_goes_only_to_a_server_that_makes_claims():
    """With a seed it ends a stock one."""
    for claims, expected in ((None, False), (ALL, True)):
        fake, seen = Fake(claims=claims), []
        original = fake.reply
        fake.reply = lambda body, n: seen.append(body["sampling_params"]) or original(body, n)  # noqa: B023
        drive(fake, axes=[Axis.SAMPLED, Axis.STRUCTURED], quick=False)
        assert any("min_p" in x for x in seen) == expected


def test_a_claimed_cache_that_never_hits_fails():
    fake = Fake(claims=ALL)
    original = fake.reply

    def forgetful(body, n):
        fake.forget()
        return original(body, n)

    fake.reply = forgetful
    report = drive(fake, axes=[Axis.PREFIX_CACHE, Axis.RUN_TO_RUN])
    assert report.row(Axis.PREFIX_CACHE).verdict == "not tested" and not report.passed


def test_a_server_that_dies_ends_the_probe_with_one_sentence():
    with pytest.raises(ProbeError, match=r"cannot reach .*/generate while .*check the URL"):
        drive(Fake(die_after=30))


def test_a_key_that_changes_ends_the_probe():
    fake = Fake(claims=ALL)
    original = fake.reply

    def reply(body, n):
        fake.key = KEY if fake.served < 20 else "ba9876543210"
        return original(body, n)

    fake.reply = reply
    with pytest.raises(ProbeError, match="numerics key changed from 0123456789ab to ba9876543210"):
        drive(fake)


def test_every_driven_axis_sends_requests():
    report = drive(Fake())
    assert all(report.row(a).requests > 0 for a in DRIVEN)
