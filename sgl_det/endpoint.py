"""``GET /determinism`` and the key in a header of every answer, on SGLang's own application.

The route is added before SGLang adds its API-key middleware, so it sits behind the same key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

HEADER = "x-sgl-det-key"
_WEIGHT_ROUTES = (
    "/update_weights",
    "/resume_memory_occupation",
    "/weights_checker",
    "/pull_weights",
)


class Determinism:
    """Asks the worker for its report and remembers the last key.

    merge   turns the worker's half of the answer into the whole
    """

    def __init__(self, merge: Callable[[dict[str, Any]], dict[str, Any]], key: str = "") -> None:
        self._merge = merge
        self.key = key

    async def report(self) -> dict[str, Any]:
        from sglang.srt.entrypoints.http_server import get_global_state

        states = await get_global_state().tokenizer_manager.get_internal_state()
        answer = self._merge(states[0]["sgl_det"])
        self.key = answer["key"]
        return answer


class KeyHeader:
    """ASGI middleware: the numerics key in a response header.

    A request that may write to the weights is answered under the key that holds after it.
    """

    def __init__(self, app: Any, source: Determinism) -> None:
        self._app, self._source = app, source

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        writes = scope["path"].startswith(_WEIGHT_ROUTES)

        async def send_with_key(message):
            if message["type"] == "http.response.start":
                if writes:
                    await self._source.report()
                header = (HEADER.encode(), self._source.key.encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        await self._app(scope, receive, send_with_key)


def install(app: Any, source: Determinism) -> None:
    """Add the route, the header, the marks and the answers to bad requests to the application."""
    from sgl_det.patches import answers, marks

    async def determinism() -> dict[str, Any]:
        return await source.report()

    app.add_api_route("/determinism", determinism, methods=["GET"])
    marks.install(app, lambda: source.key)
    answers.install(app)
    app.add_middleware(KeyHeader, source=source)
