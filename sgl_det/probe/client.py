"""HTTP: one running SGLang server, of any kind, seen as a client sees it."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

KEY_HEADER = "x-sgl-det-key"
# What every vocabulary has, for a server that does not tell its own.
SMALLEST_VOCABULARY = 256
# KV tokens per split, for a server that tells none: of our backends (triton and flashinfer, fa3),
# and between them of SGLang's FlashInfer when it decodes in deterministic mode.
USUAL_SPLITS = (512, 2048, 4096)
# SGLang's web server closes an idle connection after 5 s. Those that a client keeps for longer
# break one after the other when they are used again, and one repeated request is not enough.
KEPT_ALIVE_S = 1.0


class ProbeError(RuntimeError):
    """The probe cannot go on; the message is one sentence for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the server says about itself. Sizes are in tokens; None means that it does not say.

    radix: it has a prefix cache; grammar: it can constrain an answer.
    """

    key: str | None
    claims: frozenset[str] | None  # None: no /determinism, so nothing is claimed or disclaimed
    not_claimed: dict[str, str]
    vocab_size: int
    max_input: int
    max_total: int
    max_running: int
    chunk: int | None  # None: chunked prefill is off
    splits: tuple[int, ...]  # KV tokens per split, ascending; empty: the server does not split
    radix: bool
    grammar: bool
    page_size: int
    device: str
    model: str
    recorded: dict[str, Any]  # for the report: backend, versions, flags


class Server:
    """An aiohttp session bound to one server. Use as ``async with``."""

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 300.0):
        self.url = url.rstrip("/")
        self.key: str | None = None
        self.doing = "connecting"
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Server:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=10),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_ALIVE_S),
        )
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._session.close()

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        """Status and text of one request; a broken connection is a ProbeError."""
        try:
            try:
                return await self._send(method, path, body)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                # A kept-alive connection that the server has closed meanwhile: try a new one.
                return await self._send(method, path, body)
        except TimeoutError:
            raise ProbeError(
                f"{self.url}{path} gave no answer within {self._timeout_s:g} s while {self.doing}; "
                f"see the server's log"
            ) from None
        except (aiohttp.ClientError, OSError, ValueError) as e:
            raise ProbeError(
                f"cannot reach {self.url}{path} while {self.doing} ({type(e).__name__}); "
                f"check the URL and that the server is running"
            ) from None

    async def _send(self, method: str, path: str, body: Any) -> tuple[int, str]:
        async with self._session.request(method, self.url + path, json=body) as reply:
            text = await reply.text()
            self._check_key(reply)
            return reply.status, text

    def _check_key(self, reply: aiohttp.ClientResponse) -> None:
        key = reply.headers.get(KEY_HEADER)
        if key and self.key and key != self.key:
            raise ProbeError(
                f"the numerics key changed from {self.key} to {key} while {self.doing}; "
                f"probe a server whose weights nobody updates"
            )
        self.key = key or self.key

    async def ok(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON (or text) of a request that must succeed."""
        status, text = await self.call(method, path, body)
        if status != 200:
            raise ProbeError(
                f"{method} {path} answered {status} while {self.doing}: {_reason(text)}"
            )
        return _json(text)

    async def flush(self) -> None:
        """Empty the prefix cache. The server refuses while it is busy, so ask it to wait."""
        for _ in range(20):
            status, text = await self.call("POST", "/flush_cache?timeout=20")
            if status == 200:
                return
            if status != 400:
                break
            await asyncio.sleep(0.25)
        hint = "give --api-key" if status in (401, 403) else "is somebody else using the server?"
        raise ProbeError(f"POST /flush_cache answered {status} ({_reason(text)}); {hint}")

    async def quicken_flush(self) -> None:
        """On a CPU each flush collects garbage over SGLang's whole heap, unless it is frozen."""
        await self.call("POST", "/freeze_gc")

    async def generate(self, body: dict[str, Any]) -> Any:
        """POST /generate: one reply, or one a prompt for a list of prompts."""
        return await self.ok("POST", "/generate", body)

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a streamed answer, in order."""
        status, text = await self.call("POST", path, body | {"stream": True})
        if status != 200:
            raise ProbeError(f"POST {path} answered {status} to a stream: {_reason(text)}")
        lines = [x[5:].strip() for x in text.splitlines() if x.startswith("data:")]
        events = [json.loads(x) for x in lines if x != "[DONE]"]
        for event in events:
            if "error" in event:
                raise ProbeError(f"POST {path} broke off its stream: {_reason(json.dumps(event))}")
        return events

    async def discover(self) -> Facts:
        """Ask the server for its limits, its flags and its claims."""
        det = await self._determinism()
        info = await self._first("/server_info", "/get_server_info")
        state = (info.get("internal_states") or [{}])[0]
        max_total = int(info.get("max_total_num_tokens") or 4096)
        max_input = int(info.get("max_req_input_len") or info.get("context_length") or 2048)
        running = state.get("effective_max_running_requests_per_dp")
        running = running or info.get("max_running_requests")
        chunk = info.get("chunked_prefill_size")
        splits = _splits(det)
        backend = det.get("backend") or info.get("attention_backend")
        flags = ("dtype", "tp_size", "chunked_prefill_size", "disable_radix_cache", "page_size")
        return Facts(
            key=det.get("key"),
            claims=frozenset(det["claims"]) if "claims" in det else None,
            not_claimed=dict(det.get("not_claimed") or {}),
            vocab_size=await self._vocab_size(info),
            max_input=min(max_input, max_total) - 8,
            max_total=max_total,
            max_running=int(running or 64),
            chunk=int(chunk) if chunk and int(chunk) > 0 else None,
            splits=splits,
            radix=not info.get("disable_radix_cache"),
            grammar=_constrains(info, ours=bool(det)),
            page_size=int(info.get("page_size") or 1),
            device=str(info.get("device") or "unknown"),
            model=str(info.get("served_model_name") or "default"),
            recorded={
                "backend": backend,
                "sglang": info.get("version"),
                "device": info.get("device"),
                "deterministic_flag": bool(info.get("enable_deterministic_inference")),
                "split_tokens": list(splits),
                **{f: info.get(f) for f in flags},
            },
        )

    async def tokenize(self, text: str) -> list[int] | None:
        """The ids of a text, or None where the server has no such endpoint."""
        status, reply = await self.call("POST", "/tokenize", {"prompt": text})
        tokens = _json(reply).get("tokens") if status == 200 else None
        return tokens if isinstance(tokens, list) else None

    async def _determinism(self) -> dict[str, Any]:
        status, text = await self.call("GET", "/determinism")
        if status == 404:
            return {}
        if status != 200:
            hint = "; give --api-key" if status in (401, 403) else ""
            raise ProbeError(f"GET /determinism answered {status}: {_reason(text)}{hint}")
        found = _json(text)
        if not isinstance(found, dict) or not {"key", "claims"} <= found.keys():
            raise ProbeError(f"GET /determinism has no key and claims; is {self.url} an sgl_det?")
        return found

    async def _first(self, *paths: str) -> dict[str, Any]:
        for path in paths:
            status, text = await self.call("GET", path)
            if status == 200 and isinstance(_json(text), dict):
                return _json(text)
            if status in (401, 403):
                raise ProbeError(f"GET {path} answered {status}; give the server's --api-key")
        raise ProbeError(f"{self.url} answers none of {', '.join(paths)}; is it an SGLang server?")

    async def _vocab_size(self, info: dict[str, Any]) -> int:
        # No endpoint tells the size, but the refusal of an id outside the vocabulary does. The
        # temperature is invalid too, so a server that checks no ids refuses the request as well.
        params = {"max_new_tokens": 1, "temperature": -1.0}
        body = {"input_ids": [1], "sampling_params": params}
        body |= {"return_logprob": True, "token_ids_logprob": [2**31 - 1]}
        status, text = await self.call("POST", "/generate", body)
        told = re.search(r"valid range is \[0, (\d+)\)", text) if status == 400 else None
        if told:
            return int(told[1])
        try:
            config = json.loads((Path(str(info.get("model_path"))) / "config.json").read_text())
        except (OSError, ValueError):
            return SMALLEST_VOCABULARY
        return int((config.get("text_config") or config).get("vocab_size", SMALLEST_VOCABULARY))


def _constrains(info: dict[str, Any], *, ours: bool) -> bool:
    """Whether grammars can be asked for: a stock server on a CPU has no masks, and ends."""
    on_a_gpu = info.get("device") != "cpu"
    return info.get("grammar_backend") not in (None, "none") and (ours or on_a_gpu)


def _splits(det: dict[str, Any]) -> tuple[int, ...]:
    """The split sizes in an answer of /determinism, ascending; usual ones where it has none.

    Its ``numerics.split_tokens`` is a number or, by phase, numbers; None stands for no splits.
    """
    numerics = det.get("numerics") or {}
    if "split_tokens" not in numerics:
        return USUAL_SPLITS
    told = numerics["split_tokens"]
    sizes = told.values() if isinstance(told, dict) else (told,)
    return tuple(sorted({int(n) for n in sizes if n}))


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _reason(text: str) -> str:
    """The server's own words, short."""
    found = _json(text)
    if isinstance(found, dict):
        inner = found.get("error", found)
        found = inner.get("message", inner) if isinstance(inner, dict) else inner
    words = " ".join(str(found).split())
    return words[:200] or "no text"
