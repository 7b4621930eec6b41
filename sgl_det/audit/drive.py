"""One prefill and some decode steps of a running server, alone and in a batch, under its profiler.

The same requests, on other tokens, come first without the profiler: what is compiled or tuned on
first use is not part of the audit.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import requests

_PROMPT, _NEW, _BATCH = 200, 8, 24
_SECONDS = 900


class AuditError(RuntimeError):
    """The server did not do what the audit asked. The text is one sentence for the user."""


def drive(
    url: str, token: str, folder: Path, activities: tuple[str, ...] = ("GPU",)
) -> dict[str, Any]:
    """Leave traces in ``folder``; returns the server's answer to GET /determinism.

    Raises AuditError if the server refuses one of the requests.
    """
    with requests.Session() as session:
        session.headers["Authorization"] = f"Bearer {token}"
        report = _call(session, "GET", f"{url}/determinism").json()
        claims = report.get("claims", ())
        for body in bodies(claims, first=100):
            _call(session, "POST", f"{url}/generate", body)
        start = {
            "output_dir": str(folder),
            "activities": list(activities),
            "with_stack": False,
            "record_shapes": False,
            "profile_id": "audit",
        }
        _call(session, "POST", f"{url}/start_profile", start)
        for body in bodies(claims, first=0):
            _call(session, "POST", f"{url}/generate", body)
        _call(session, "POST", f"{url}/stop_profile")
    return report


def bodies(claims: Collection[str], first: int) -> list[dict[str, Any]]:
    """The audited requests; sampled ones too where the server claims them.

    first   of the tokens, so that two calls share no prefix
    """
    greedy = {"temperature": 0.0}
    sampled = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "sampling_seed": 1}
    found = []
    for params in (greedy, sampled) if "sampled" in claims else (greedy,):
        first += 25
        found.append(_body(prompt(_PROMPT, first), params))
        found.append(_body([prompt(3 + 2 * i, first + 1 + i) for i in range(_BATCH)], params))
    return found


def prompt(length: int, first: int) -> list[int]:
    """Token ids below 256, which every vocabulary has."""
    return [3 + (first + 7 * i) % 250 for i in range(length)]


def _body(ids: list, params: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": _NEW, "ignore_eos": True, **params},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
    }


def _call(
    session: requests.Session, method: str, url: str, body: dict[str, Any] | None = None
) -> requests.Response:
    try:
        reply = session.request(method, url, json=body, timeout=_SECONDS)
    except requests.RequestException as error:
        raise AuditError(f"{method} {url} was not answered: {error}") from error
    if reply.status_code != 200:
        words = " ".join(reply.text.split())[:200]
        raise AuditError(f"{method} {url} was answered {reply.status_code}: {words}")
    return reply
