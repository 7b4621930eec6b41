"""A make-believe SGLang server for the soak: streams in parts, aborts, conversations, leaks.

An answer is a function of its request and of `leak`: "batch" lets the number of requests in flight
in, from RARE on; "dies" answers 500 after some requests; "key" changes the key then;
"breaks" ends each stream after its first part.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from functools import cache

from aiohttp import web

from fake_server import KEY, FakeServer

OTHER_KEY = "ba9876543210"
RARE = 11
AFTER = 60
CLAIMS = ("batch_size", "batch_composition", "long_beside_short", "chunked_prefill", "prefix_cache")
CLAIMS += ("prefill_vs_decode", "logprob_neighbour", "sampled", "structured", "preemption")


class FakeSoak(FakeServer):
    """Serves what a soak asks for."""

    splits, running_limit = 64, 16
    limits = {"max_total_num_tokens": 2000, "max_req_input_len": 900}

    def __init__(self, leak: str = "", claims: tuple[str, ...] | None = CLAIMS, key: str = KEY):
        super().__init__(leak, claims, key)
        self.kinds_seen: set[str] = set()
        self.aborted: set[str] = set()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/determinism", self.determinism)
        app.router.add_get("/server_info", self.info)
        app.router.add_post("/flush_cache", self.flush)
        app.router.add_post("/freeze_gc", self.flush)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions", self.chat)
        return app

    async def flush(self, _request):
        return web.Response(status=400 if self.running else 200)

    async def abort(self, request):
        self.aborted.add((await request.json())["rid"])
        return web.Response()

    async def generate(self, request):
        body = await request.json()
        if body.get("token_ids_logprob") == [2**31 - 1]:
            return web.json_response({"error": "valid range is [0, 300)"}, status=400)
        return await self._serve(request, body, self._native)

    async def completions(self, request):
        body = await request.json()
        return await self._serve(request, body, self._completion)

    async def chat(self, request):
        body = await request.json()
        return await self._serve(request, body, self._chat)

    async def _serve(self, request, body, answer):
        self.served += 1
        if self.leak == "dies" and self.served > AFTER:
            return web.Response(status=500, text="the scheduler is gone")
        key = OTHER_KEY if self.leak == "key" and self.served > AFTER else self.key
        headers = {} if self.claims is None else {"x-sgl-det-key": key}
        self.running += 1
        try:
            await asyncio.sleep(0.002)
            if not body.get("stream"):
                return web.json_response(answer(body, None), headers=headers)
            reply = web.StreamResponse(headers=headers)
            await reply.prepare(request)
            asked = body.get("max_tokens") or body["sampling_params"]["max_new_tokens"]
            before = 0
            for n in [*range(1, asked, max(1, asked // 6)), asked]:
                part, before = answer(body, n, before), n
                await reply.write(f"data: {json.dumps(part)}\n\n".encode())
                if body.get("rid") in self.aborted or self.leak == "breaks":
                    break
                await asyncio.sleep(0)
            await reply.write(b"data: [DONE]\n\n")
            return reply
        except ConnectionResetError:  # the client has gone
            return reply
        finally:
            self.running -= 1

    def _native(self, body, upto, _before=0):
        params = body["sampling_params"]
        if isinstance(params, list):
            n = len(params)
            bodies = [{k: v[i] for k, v in body.items() if v[i] is not None} for i in range(n)]
            return [self._native(b, None) for b in bodies]
        ids = body.get("input_ids") or list(body["text"].encode())
        what = {k: v for k, v in params.items() if k not in ("max_new_tokens", "stream_interval")}
        rows = self._rows((ids, sorted(what.items())), params["max_new_tokens"])[:upto]
        whole = upto is None or upto == params["max_new_tokens"]
        finish = {"type": "length", "length": params["max_new_tokens"]} if whole else None
        if body.get("rid") in self.aborted and not whole:
            finish = {"type": "abort", "message": "Aborted"}
        meta = {"finish_reason": finish, "prompt_tokens": len(ids), "cached_tokens": 0}
        meta["completion_tokens"] = len(rows)
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[p, t, None] for t, p in rows]
            k = body["top_logprobs_num"]
            meta["output_top_logprobs"] = [
                [[p - i, t + i, None] for i in range(k)] for t, p in rows
            ]
            if body.get("logprob_start_len", -1) >= 0:
                meta["input_token_logprobs"] = [[-1.0 - t, t, None] for t in ids]
            if body.get("token_ids_logprob"):
                listed = body["token_ids_logprob"]
                meta["output_token_ids_logprobs"] = [
                    [[p, t, None] for t in listed] for _, p in rows
                ]
        return {"text": _text(rows), "output_ids": [t for t, _ in rows], "meta_info": meta}

    def _completion(self, body, _upto, _before=0):
        names = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}
        names["min_tokens"] = "min_new_tokens"
        asked = {k: v for k, v in body.items() if k not in ("model", "prompt", "logprobs")}
        prompt = body["prompt"]
        kind = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
        params = {names.get(k, k): v for k, v in asked.items()}
        native = self._native(kind | {"sampling_params": params, "return_logprob": False}, None)
        ids = prompt if isinstance(prompt, list) else list(prompt.encode())
        what = {k: v for k, v in params.items() if k != "max_new_tokens"}
        rows = self._rows((ids, sorted(what.items())), params["max_new_tokens"])
        probs = {"tokens": [], "token_logprobs": [p for _, p in rows]}
        return {"choices": [{"text": native["text"], "logprobs": probs, "finish_reason": "length"}]}

    def _chat(self, body, upto, before=0):
        rows = self._rows((body["messages"], body["temperature"]), body["max_tokens"])
        done = "length" if upto in (None, body["max_tokens"]) else None
        if upto is not None:
            text = {"delta": {"content": _text(rows[before:upto])}}
            return {"choices": [text | {"finish_reason": done}]}
        probs = [{"token": str(t), "logprob": p, "top_logprobs": []} for t, p in rows]
        message = {"message": {"content": _text(rows)}, "logprobs": {"content": probs}}
        return {"choices": [message | {"finish_reason": done}]}

    def _rows(self, what, n: int) -> list[tuple[int, float]]:
        rows = _rows(repr(what), n)
        if self.leak == "batch" and self.running >= RARE:
            token, logprob = rows[-1]
            return [*rows[:-1], (token, logprob * (1 + 2**-50))]
        return rows


@cache
def _rows(what: str, n: int) -> list[tuple[int, float]]:
    raw = [hashlib.sha256(f"{what} {i}".encode()).digest() for i in range(n)]
    return [(r[0], -1.0 - int.from_bytes(r[1:4]) / 2**24) for r in raw]


def _text(rows) -> str:
    return "".join(f"<{t}>" for t, _ in rows)
