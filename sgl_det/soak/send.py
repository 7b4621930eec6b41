"""One act of the load: some of the plan's requests, sent in one way, and what came back of each.

Ways that end an answer early give its beginning, and a batch gives several answers; all others give
one whole answer each.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from sgl_det.probe.replies import joined_stream
from sgl_det.soak.answers import (
    QUIET,
    Difference,
    Parts,
    choice_parts,
    cut_difference,
    difference,
    is_aborted,
    native_parts,
)
from sgl_det.soak.items import CHAT, TOP_LOGPROBS, Item
from sgl_det.soak.wire import Refused, ServerFailed, SoakServer

PLAIN, STREAM, QUIETLY, MANY, COMPLETIONS = "plain", "stream", "quiet", "many", "completions"
ABORT, ABORT_STREAM, DISCONNECT, LEAVE = "abort", "abort_stream", "disconnect", "leave"
CUT_SHORT = (ABORT, ABORT_STREAM, DISCONNECT, LEAVE)
_COMPLETIONS = "/v1/completions"
# Native name of a sampling parameter -> that of OpenAI's completions.
_OPENAI = {"max_new_tokens": "max_tokens", "sampling_seed": "seed", "min_new_tokens": "min_tokens"}
_OPENAI |= {n: n for n in ("temperature", "top_p", "top_k", "min_p", "ignore_eos", "logit_bias")}
_OPENAI |= {n: n for n in ("frequency_penalty", "presence_penalty", "repetition_penalty")}


@dataclass(frozen=True, slots=True)
class Entry:
    """A request and its oracle."""

    item: Item
    expected: Parts


Book = Mapping[str, Entry]


@dataclass(slots=True)
class Act:
    """names of the requests, the way, and its options; start and end in seconds on one clock.

    options: interval, tokens to each part of a stream; after, parts (a disconnect) or seconds (the
    other ways that end early); rid, of a request that is aborted.
    """

    names: tuple[str, ...]
    way: str
    options: dict[str, Any] = field(default_factory=dict)
    start: float = 0.0
    end: float | None = None


@dataclass(slots=True)
class Reply:
    """An answer and what of it is compared; cut: it was ended early. meta: SGLang's meta_info."""

    name: str
    parts: Parts
    only: tuple[str, ...] | None = None
    cut: bool = False
    meta: dict[str, Any] = field(default_factory=dict)

    def difference(self, book: Book) -> Difference | None:
        expected = book[self.name].expected
        if self.cut:
            return cut_difference(expected, self.parts)
        return difference(expected, self.parts, self.only)


def ways(item: Item) -> list[str]:
    """The ways in which a request can be sent."""
    if item.route == CHAT:
        return [PLAIN, STREAM, LEAVE]
    found = [PLAIN, STREAM, QUIETLY, ABORT, ABORT_STREAM, DISCONNECT, LEAVE]
    # SGLang takes a list of ids for one request's where the batch's first asks for none.
    if "input_ids" in item.body and "token_ids_logprob" not in item.body:
        found.append(MANY)
    if item.body["sampling_params"].keys() <= _OPENAI.keys():
        found.append(COMPLETIONS)
    return found


async def send(server: SoakServer, book: Book, act: Act) -> list[Reply]:
    """Do it. Raises ServerFailed, or Refused where a request that had an oracle is refused."""
    item = book[act.names[0]].item
    if act.way == MANY:
        return await _many(server, [book[n].item for n in act.names])
    if act.way == COMPLETIONS:
        reply = await server.post(_COMPLETIONS, _as_completion(item))
        return [Reply(item.name, choice_parts([reply]), ("text", "logprobs"))]
    if act.way == LEAVE:
        return await _leave(server, item, act.options["after"])
    if item.route == CHAT:
        return [await _chat(server, item, act)]
    body = _asked(item, act)
    if act.way in (ABORT, ABORT_STREAM):
        return await _aborted(server, item, body, act)
    if act.way in (STREAM, DISCONNECT):
        reply = await _stream(server, item, body, act.options.get("after"))
        return [reply] if reply else []
    whole = await server.post(item.route, body)
    only = QUIET if act.way == QUIETLY else None
    return [Reply(item.name, native_parts(whole), only, meta=whole["meta_info"])]


def _asked(item: Item, act: Act) -> dict[str, Any]:
    body = dict(item.body)
    if act.way == QUIETLY:
        names = ("return_logprob", "top_logprobs_num", "logprob_start_len", "token_ids_logprob")
        body = {k: v for k, v in body.items() if k not in names}
    if "interval" in act.options:
        interval = {"stream_interval": act.options["interval"]}
        body["sampling_params"] = body["sampling_params"] | interval
    if "rid" in act.options:
        body["rid"] = act.options["rid"]
    return body


async def _many(server: SoakServer, items: list[Item]) -> list[Reply]:
    """All in one request: what one leaves out, the others' default stands for."""
    usual = {"logprob_start_len": -1}
    names = dict.fromkeys(k for item in items for k in item.body)
    body = {k: [item.body.get(k, usual.get(k)) for item in items] for k in names}
    replies = await server.post(items[0].route, body)
    return [
        Reply(item.name, native_parts(r), meta=r["meta_info"])
        for item, r in zip(items, replies, strict=True)
    ]


async def _stream(
    server: SoakServer, item: Item, body: dict[str, Any], parts: int | None
) -> Reply | None:
    """A stream read to its end, or only so many parts of it; None where none came."""
    raw = []
    async with aclosing(server.stream(item.route, body)) as events:
        async for event in events:
            raw.append(event)
            if len(raw) == parts:
                break
    ended = parts is not None or "rid" in body
    if not raw:
        if not ended:
            raise ServerFailed(f"POST {item.route} ended a stream without a part")
        return None
    last = json.loads(raw[-1])
    if "error" in last:
        if "rid" in body and "abort" in str(last).lower():  # it had not begun
            return None
        raise ServerFailed(f"POST {item.route} broke off its stream: {str(last)[:300]}")
    only, meta = None, last["meta_info"]
    if len(last["output_ids"]) < meta["completion_tokens"]:
        # Each part holds what is new in it.
        last = joined_stream([json.loads(x) for x in raw])
        only = ("tokens", "logprobs", "top", "finish", "prompt_length")
    cut = ended and meta["finish_reason"] is None
    return Reply(item.name, native_parts(last), only, cut, meta)


async def _aborted(server: SoakServer, item: Item, body: dict[str, Any], act: Act) -> list[Reply]:
    """A request that is aborted some time after it was sent; it may be whole by then."""

    async def ask() -> Reply | None:
        if act.way == ABORT_STREAM:
            return await _stream(server, item, body, None)
        try:
            whole = await server.post(item.route, body)
        except Refused as e:
            if "abort" in str(e).lower():  # it had not begun
                return None
            raise
        return Reply(item.name, native_parts(whole), meta=whole["meta_info"])

    async def abort() -> None:
        await asyncio.sleep(act.options["after"])
        await server.abort(act.options["rid"])

    found, _ = await asyncio.gather(ask(), abort())
    if found is None:
        return []
    found.cut = found.cut or is_aborted(found.parts)
    return [found]


async def _leave(server: SoakServer, item: Item, after: float) -> list[Reply]:
    """The client closes the connection, unless the answer comes first."""
    try:
        whole = await asyncio.wait_for(server.post(item.route, item.body), after)
    except TimeoutError:
        return []
    if item.route == CHAT:
        return [Reply(item.name, choice_parts([whole]))]
    return [Reply(item.name, native_parts(whole), meta=whole["meta_info"])]


async def _chat(server: SoakServer, item: Item, act: Act) -> Reply:
    if act.way == STREAM:
        async with aclosing(server.stream(item.route, item.body)) as events:
            found = [json.loads(event) async for event in events]
        # A stream's parts need not hold a whole token each, so its rows are others.
        return Reply(item.name, choice_parts(found), ("text", "finish"))
    return Reply(item.name, choice_parts([await server.post(item.route, item.body)]))


def _as_completion(item: Item) -> dict[str, Any]:
    given = {_OPENAI[k]: v for k, v in item.body["sampling_params"].items()}
    prompt = item.body.get("input_ids") or item.body["text"]
    return given | {"model": "default", "prompt": prompt, "logprobs": TOP_LOGPROBS}


def tokens_in(replies: Iterable[Reply], book: Book) -> int:
    """Generated tokens of the answers that were compared whole."""
    return sum(len(book[r.name].expected.get("tokens") or ()) for r in replies if not r.cut)
