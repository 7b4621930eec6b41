"""The answers of /generate, in one piece or streamed."""

from __future__ import annotations

from typing import Any

from sgl_det.probe.client import ProbeError
from sgl_det.probe.compare import Answer, hex_bits


def native_answer(reply: dict[str, Any]) -> Answer:
    """The Answer in a reply of /generate."""
    meta = reply["meta_info"]
    reason = meta.get("finish_reason") or {}
    if reason.get("type") == "abort":
        raise ProbeError(
            f"the server aborted a request: {reason.get('message', 'no reason given')}"
        )
    chosen = meta.get("output_token_logprobs")
    tokens = tuple(reply.get("output_ids") or (t for _, t, *_ in chosen or ()))
    return Answer(
        tokens=tokens,
        logprobs=None if chosen is None else tuple(hex_bits(p) for p, *_ in chosen),
        top=top_entries(meta.get("output_top_logprobs")),
        cached=int(meta.get("cached_tokens") or 0),
    )


def joined_stream(events: list[dict[str, Any]]) -> dict[str, Any]:
    """One reply from the events of a streamed /generate, cumulative or incremental."""
    last = events[-1]
    if len(last["output_ids"]) >= last["meta_info"]["completion_tokens"]:
        return last
    meta = dict(last["meta_info"])
    for name in ("output_token_logprobs", "output_top_logprobs"):
        meta[name] = [x for e in events for x in e["meta_info"].get(name) or ()]
    return {"output_ids": [t for e in events for t in e["output_ids"]], "meta_info": meta}


def top_entries(rows: list | None) -> tuple | None:
    """Top logprobs [T][k] of (id, hex) from SGLang's (logprob, id, text) triples."""
    if not rows:
        return None
    return tuple(tuple((t, hex_bits(p)) for p, t, *_ in row or ()) for row in rows)
