"""The oracle: each request of the plan answered alone, on an empty cache; kept in a file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sgl_det.probe.client import Facts, ProbeError
from sgl_det.probe.compare import NOT_A_NUMBER
from sgl_det.soak.answers import Parts, choice_parts, native_parts
from sgl_det.soak.items import CHAT, Item
from sgl_det.soak.send import Entry
from sgl_det.soak.wire import Refused, SoakServer

VERSION = 1


async def measure(server: SoakServer, item: Item) -> Parts:
    """The answer of one request, alone and cold. Raises ProbeError where it cannot be an oracle."""
    server.doing = f"measuring the oracle of {item.name}"
    await server.flush()
    reply = await server.post(item.route, item.body)
    if item.route == CHAT:
        return choice_parts([reply])
    cached, parts = reply["meta_info"].get("cached_tokens"), native_parts(reply)
    if cached:
        raise ProbeError(
            f"the server reports {cached} cached tokens right after /flush_cache; without a cold "
            f"cache there is no oracle: is somebody else using the server?"
        )
    if NOT_A_NUMBER in parts["logprobs"]:
        raise ProbeError(
            f"the logprobs of {item.name} are not numbers; a broken model proves nothing"
        )
    return parts


async def measured(
    server: SoakServer, items: Iterable[Item], done: Callable[[], Any]
) -> tuple[dict[str, Entry], float]:
    """The book of all items, and the median seconds of an answer. done is called after each.

    A route that the server refuses is left out of the book.
    """
    book: dict[str, Entry] = {}
    seconds: list[float] = []
    refused = ""
    for item in items:
        if item.after:
            before = book[item.after]
            item = item.grown(before.item, before.expected["tokens"])
        start = time.perf_counter()
        try:
            book[item.name] = Entry(item, await measure(server, item))
        except Refused as e:
            if item.route != CHAT:
                raise ProbeError(f"{item.name}: {e}") from None
            refused = str(e)
        seconds.append(time.perf_counter() - start)
        done()
    if not book:
        raise ProbeError(f"no request has an oracle{f': {refused}' if refused else ''}")
    return book, sorted(seconds)[len(seconds) // 2]


def save(path: Path, book: dict[str, Entry], key: str | None, seed: int, pace_s: float) -> None:
    """Write an oracle that another soak of the same numerics key may use."""
    entries = [{"item": asdict(e.item), "expected": e.expected} for e in book.values()]
    head = {"sgl_det_soak_oracle": VERSION, "key": key, "seed": seed, "pace_s": pace_s}
    path.write_text(json.dumps(head | {"entries": entries}) + "\n")


def load(path: Path, key: str | None, facts: Facts) -> tuple[dict[str, Entry], float]:
    """A saved oracle, without what does not fit this server, and its pace.

    Raises ProbeError for another numerics key: equal bits are promised for equal keys only.
    """
    found = read(path, "sgl_det_soak_oracle", VERSION, "--oracle-file")
    if key is None or found["key"] != key:
        raise ProbeError(
            f"{path} was measured under the numerics key {found['key'] or 'none'}, the server's is "
            f"{key or 'none'}; equal bits are promised for equal keys only: give another file"
        )
    book = {}
    for entry in found["entries"]:
        item = Item(**entry["item"])
        if item.footprint <= min(facts.max_input, facts.max_total - facts.page_size):
            book[item.name] = Entry(item, entry["expected"])
    return book, found["pace_s"]


def read(path: Path, name: str, version: int, flag: str) -> dict[str, Any]:
    """A JSON file of ours. Raises ProbeError where it is none, or of another version."""
    try:
        found = json.loads(path.read_text())
    except OSError as e:
        raise ProbeError(f"cannot read {path}: {e.strerror}") from None
    except ValueError:
        found = None
    if not isinstance(found, dict) or found.get(name) != version:
        raise ProbeError(f"{path} is not a file for {flag} that this version wrote")
    return found
