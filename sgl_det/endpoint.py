"""``GET /determinism`` and the key in a header of every answer, on SGLang's own application.

The route is added before SGLang adds its API-key middleware, so it sits behind the same key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_det import events

HEADER = "x-sgl-det-key"
_WEIGHT_ROUTES = (
    "/update_weights",
    "/resume_memory_occupation",
    "/weights_checker",
    "/pull_weights",
)
_HEALTH = ("/health", "/health_generate", "/ping")


class Determinism:
    """Asks the worker for its report, and remembers the last key and problem.

    merge   turns the worker's half of the answer into the whole
    board   the sentence that the worker left, or "": read without asking it
    told    called with each whole answer
    """

    def __init__(
        self,
        merge: Callable[[dict[str, Any]], dict[str, Any]],
        *,
        board: Callable[[], str] = lambda: "",
        told: Callable[[dict[str, Any]], None] = lambda answer: None,
    ) -> None:
        self._merge, self._board, self._told = merge, board, told
        self._problem: str | None = None
        self.key = ""

    @property
    def problem(self) -> str | None:
        """Why nothing is claimed any more, as far as is known; costs nothing."""
        return self._board() or self._problem

    async def report(self) -> dict[str, Any]:
        from sglang.srt.entrypoints.http_server import get_global_state

        states = await get_global_state().tokenizer_manager.get_internal_state()
        return self.take(states[0]["sgl_det"])

    def take(self, report: dict[str, Any]) -> dict[str, Any]:
        """The whole answer for a worker's report; a new key or problem is told as an event."""
        answer = self._merge(report)
        if self.key and answer["key"] != self.key:
            events.tell("key_changed", key=answer["key"], before=self.key)
        if answer["problem"] and answer["problem"] != self._problem:
            events.tell("problem", key=answer["key"], reason=answer["problem"])
        self.key, self._problem = answer["key"], answer["problem"]
        self._told(answer)
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


class Closed:
    """ASGI middleware: 503 where a server must get no more requests.

    The health routes say so where a proof no longer holds, whatever SGLang would say. The routes
    that generate say so after SIGTERM: what runs is finished, nothing new is begun.
    """

    def __init__(self, app: Any, source: Determinism, ends: Callable[[], bool]) -> None:
        self._app, self._source, self._ends = app, source, ends

    async def __call__(self, scope, receive, send) -> None:
        from starlette.responses import JSONResponse

        reason = self._reason(scope) if scope["type"] == "http" else None
        if reason is None:
            await self._app(scope, receive, send)
            return
        error = {"error": {"message": reason, "type": "unavailable", "code": 503}}
        await JSONResponse(error, status_code=503)(scope, receive, send)

    def _reason(self, scope: dict[str, Any]) -> str | None:
        from sgl_det.patches.marks import ROUTES

        if scope["path"] in _HEALTH:
            return self._source.problem
        if self._ends() and scope["path"] in (*ROUTES, "/generate"):
            return "the server is shutting down and takes no new requests; send it to another one"
        return None


def install(app: Any, source: Determinism) -> None:
    """Add the route, the header, the marks and the answers to bad requests to the application."""
    from sgl_det import launch_hook
    from sgl_det.patches import answers, marks

    async def determinism() -> dict[str, Any]:
        return await source.report()

    app.add_api_route("/determinism", determinism, methods=["GET"])
    marks.install(app, lambda: source.key)
    answers.install(app)
    app.add_middleware(Closed, source=source, ends=launch_hook.asked)
    app.add_middleware(KeyHeader, source=source)
