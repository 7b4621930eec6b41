"""A make-believe SGLang server.

It answers as a function of the prompt, and can be told to let something else in: the number of
requests in flight, the prefix cache, what decode wrote there, a split of the KV, a stream, what
neighbours ask for.
"""

from __future__ import annotations

import asyncio
import hashlib
import json

from aiohttp import web

from fake_server import FakeServer

VOCAB = 300
SPLIT = 200


class Fake(FakeServer):
    """An SGLang server whose next token depends on the tokens before it, and on `leak`."""

    splits = {"prefill": None, "decode": SPLIT}
    limits = {"max_total_num_tokens": 9000, "max_req_input_len": 1000}

    def __init__(
        self, leak: str = "", claims: list[str] | None = None, die_after: int | None = None
    ):
        super().__init__(leak, claims)
        self.die_after = die_after
        self.seen: list[tuple[int, ...]] = []
        self.decoded_from: list[int] = []  # the position at which each of them was generated
        self.asked: list[dict] = []  # the parameters of those that run
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

    def flags(self):
        grammar = "none" if self.leak == "no grammar" else "xgrammar"
        return super().flags() | {"disable_radix_cache": not self.radix, "grammar_backend": grammar}

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
