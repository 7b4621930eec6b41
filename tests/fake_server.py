"""What make-believe SGLang servers tell of themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aiohttp import web

KEY = "0123456789ab"


class FakeServer:
    """claims None: a server without /determinism. Subclasses say what it has, and answer.

    splits, limits, flags   as /determinism and /server_info tell them; running: requests at once
    """

    splits: Any = None
    limits: dict[str, int] = {}
    running_limit = 64

    def __init__(self, leak: str, claims: Iterable[str] | None, key: str = KEY):
        self.leak, self.claims, self.key = leak, claims, key
        self.running = self.served = 0

    def flags(self) -> dict[str, Any]:
        return {"chunked_prefill_size": 64, "device": "cpu", "grammar_backend": "xgrammar"}

    async def determinism(self, _request):
        if self.claims is None:
            raise web.HTTPNotFound()
        found = {"key": self.key, "claims": self.claims, "not_claimed": {}}
        return web.json_response(found | {"numerics": {"split_tokens": self.splits}})

    async def info(self, _request):
        state = {"effective_max_running_requests_per_dp": self.running_limit}
        told = self.limits | self.flags() | {"internal_states": [state], "version": "0.5.17"}
        return web.json_response(told)
