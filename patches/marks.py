"""What an answer over HTTP tells beside its text: the numerics key, and the seeds that repeat it.

    system_fingerprint            the key, in OpenAI's completions and chats, in each of a stream
    sglext.sampling_seeds         one seed a choice, in the answer, or in a stream's first part
                                  that is sent after they are known

The native route tells its seed in ``meta_info``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from sgl_det.patches.seeds import TOLD

FINGERPRINTED = ("/v1/completions", "/v1/chat/completions", "/invocations")
ROUTES = (*FINGERPRINTED, "/v1/responses", "/v1/messages", "/api/chat", "/api/generate")
_LENGTH = b"content-length"


def marked(line: bytes, marks: dict[str, Any]) -> bytes:
    """An object of JSON with ``marks`` in it; anything else, and an error, as it is."""
    prefix, brace, _ = line.partition(b"{")
    if not marks or not brace or prefix not in (b"", b"data: ") or not line.endswith(b"}"):
        return line
    if line.startswith(b'{"error"', len(prefix)):
        return line
    if b'"sglext":' in line:  # seldom: SGLang tells something there too
        found = json.loads(line[len(prefix) :])
        ext = {**(found.get("sglext") or {}), **marks.get("sglext", {})}
        return prefix + json.dumps({**found, **marks, "sglext": ext}).encode()
    return line[:-1] + b"," + json.dumps(marks, separators=(",", ":")).encode()[1:]


class Marks:
    """ASGI middleware: adds both to the answers of the routes that generate."""

    def __init__(self, app: Any, key: Callable[[], str]) -> None:
        self._app, self._key = app, key

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "http" and scope["path"] in ROUTES:
            send = _Marking(scope, send, self._key()).send
        await self._app(scope, receive, send)


class _Marking:
    """The sending half of one request."""

    def __init__(self, scope, send, key: str) -> None:
        self._scope, self._send = scope, send
        self._always = {"system_fingerprint": key} if scope["path"] in FINGERPRINTED else {}
        self._start: dict[str, Any] | None = None  # of an answer in one piece, until it is whole
        self._body = b""
        self._plain = self._told = False

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            kind = dict(message.get("headers", ())).get(b"content-type", b"")
            self._plain = message["status"] != 200
            if not self._plain and kind.startswith(b"application/json"):
                self._start = message
                return
        elif message["type"] == "http.response.body" and self._start is not None:
            self._body += message.get("body", b"")
            if message.get("more_body"):
                return
            message = {**message, "body": self._mark(self._body)}
            await self._send(self._sized(len(message["body"])))
        elif message["type"] == "http.response.body" and not self._plain:
            lines = message.get("body", b"").split(b"\n")
            message = {**message, "body": b"\n".join(map(self._mark, lines))}
        await self._send(message)

    def _sized(self, length: int) -> dict[str, Any]:
        headers = [h for h in self._start["headers"] if h[0].lower() != _LENGTH]
        return {**self._start, "headers": [*headers, (_LENGTH, str(length).encode())]}

    def _mark(self, line: bytes) -> bytes:
        seeds = self._scope.get(TOLD)
        if self._told or not seeds:
            return marked(line, self._always)
        found = marked(line, {**self._always, "sglext": {"sampling_seeds": seeds}})
        self._told = found is not line
        return found


def install(app: Any, key: Callable[[], str]) -> None:
    """Add it to SGLang's FastAPI application, before it starts to serve."""
    app.add_middleware(Marks, key=key)
