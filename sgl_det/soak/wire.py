"""The soak's connection: a stream that is read part by part, aborts, and failures of the server."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from sgl_det.probe.client import ProbeError, Server

_RETRACTED = re.compile(r"^sglang:num_retracted_requests_total(?:\{[^}]*\})? (\S+)$", re.M)


class ServerFailed(RuntimeError):
    """The server died, broke a connection, or answered 5xx; the message is one sentence."""


class Refused(RuntimeError):
    """The server answered 4xx; the message is one sentence."""


class SoakServer(Server):
    """A `Server` whose failures are told apart: what it did wrong, and what the soak did.

    Each request has a connection of its own, so that none is lost because an idle one was closed.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 300.0):
        super().__init__(url, api_key, timeout_s)
        self._headers["Connection"] = "close"

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON of a reply. Raises ServerFailed or Refused."""
        async with self.opened(path, body) as reply:
            return json.loads(await reply.read())

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        """The data of a stream's events as they come, not parsed. Raises as `post` does."""
        async with self.opened(path, body | {"stream": True}) as reply:
            rest = b""
            async for piece in reply.content.iter_any():
                *whole, rest = (rest + piece).split(b"\n\n")
                for event in whole:
                    data = event.removeprefix(b"data: ")
                    if data != b"[DONE]" and event.startswith(b"data: "):
                        yield data

    @asynccontextmanager
    async def opened(
        self, path: str, body: dict[str, Any]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A reply whose status is 200, its body not yet read; closed early, the client is gone."""
        try:
            async with self._session.post(self.url + path, json=body) as reply:
                self._check_key(reply)
                if reply.status != 200:
                    kind = ServerFailed if reply.status >= 500 else Refused
                    words = " ".join((await reply.text()).split())[:300]
                    raise kind(f"POST {path} answered {reply.status}: {words}")
                yield reply
        except TimeoutError:
            raise ServerFailed(
                f"POST {path} gave no whole answer within {self._timeout_s:g} s"
            ) from None
        except (aiohttp.ClientError, OSError) as e:
            raise ServerFailed(
                f"POST {path} lost its connection ({type(e).__name__}: {e}); see the server's log"
            ) from None

    async def abort(self, rid: str) -> None:
        async with self.opened("/abort_request", {"rid": rid}):
            pass

    async def flush(self) -> None:
        """As `Server.flush`, but a dead server is its own failure."""
        refused: Refused | None = None
        for _ in range(20):
            try:
                async with self.opened("/flush_cache?timeout=20", {}):
                    return
            except Refused as e:
                refused = e
                await asyncio.sleep(0.25)
        raise ProbeError(f"{refused}; is somebody else using the server?")

    async def try_flush(self) -> bool:
        """Whether the prefix cache was emptied; a busy server refuses."""
        try:
            async with self.opened("/flush_cache", {}):
                return True
        except Refused:
            return False

    async def retractions(self) -> int | None:
        """Requests retracted so far, as /metrics counts them; None without --enable-metrics."""
        try:
            status, text = await self.call("GET", "/metrics")
        except ProbeError:
            return None
        if status != 200 or "sglang:" not in text:
            return None
        return int(sum(float(n) for n in _RETRACTED.findall(text)))
