"""How a refusal looks over HTTP: 4xx and a short reason, on every route, for streams too.

SGLang answers a refused stream with 200 and an error inside it on some routes, lets a ValueError
become a 500 on others, and repeats the whole body in the reason when a field has a wrong type.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["Answers", "install"]

_STREAMS = (b"text/event-stream", b"application/x-ndjson")
_PREFACES = (b"event: message_start", b"event: ping")
_MAX_ERRORS, _MAX_TEXT = 10, 300


def _is_preface(body: bytes) -> bool:
    """Whether a chunk tells nothing yet: Anthropic's streams open before the prompt is read."""
    events = [line for line in body.splitlines() if line.startswith(b"event: ")]
    return bool(events) and all(event in _PREFACES for event in events)


def _stream_error(body: bytes) -> tuple[int, dict[str, Any]] | None:
    """Status and answer, if a stream's first chunk is nothing but an error of the client's."""
    for line in body.splitlines():
        if not line.startswith(b"data: {"):
            continue
        answer = json.loads(line.removeprefix(b"data: "))
        error = answer.get("error")
        if not isinstance(error, dict):
            return None
        code = error.get("code")
        if isinstance(code, int) and 400 <= code < 500:
            return code, answer
        return (400, answer) if error.get("type") == "invalid_request_error" else None
    return None


class Answers:
    """ASGI middleware: holds the status of a stream until its first chunk tells which it is."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(scope, receive, send)
        try:
            await self._app(scope, receive, answer.send)
        except ValueError as error:
            # SGLang's own convention: a ValueError is the client's.
            if answer.started:
                raise
            await answer.refuse(400, {"error": {"message": str(error), "code": 400}})


class _Answer:
    """The sending half of one request."""

    def __init__(self, scope, receive, send) -> None:
        self._ends = scope, receive, send
        self._held: list[dict[str, Any]] = []
        self.started = self._refused = False

    async def send(self, message: dict[str, Any]) -> None:
        kind, (*_, send) = message["type"], self._ends
        if self._refused:
            return
        if kind == "http.response.start" and _is_stream(message):
            self._held.append(message)
            return
        if self._held:
            body = message.get("body", b"")
            if _is_preface(body) and message.get("more_body"):
                self._held.append(message)
                return
            error = _stream_error(body)
            if error is not None:
                await self.refuse(*error)
                return
            for held in self._held:
                await send(held)
            self._held = []
        self.started = True
        await send(message)

    async def refuse(self, status: int, content: dict[str, Any]) -> None:
        from starlette.responses import JSONResponse

        self.started = self._refused = True
        await JSONResponse(content, status_code=status)(*self._ends)


def _is_stream(message: dict[str, Any]) -> bool:
    headers = dict(message.get("headers", ()))
    return message["status"] == 200 and headers.get(b"content-type", b"").startswith(_STREAMS)


def _shortened(error: dict[str, Any]) -> dict[str, Any]:
    """A validation error without the input that it quotes, which may be the whole body."""
    place = tuple(part[:_MAX_TEXT] if isinstance(part, str) else part for part in error["loc"])
    return {"type": error.get("type", ""), "loc": place, "msg": str(error["msg"])[:_MAX_TEXT]}


def install(app: Any) -> None:
    """Add both to SGLang's FastAPI application, before it starts to serve."""
    from fastapi.exceptions import RequestValidationError

    original = app.exception_handlers[RequestValidationError]

    async def validation_error(request, error):
        shortened = [_shortened(e) for e in error.errors()[:_MAX_ERRORS]]
        return await original(request, RequestValidationError(shortened))

    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_middleware(Answers)
