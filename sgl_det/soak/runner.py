"""A soak from its start to its result: facts, oracle, load."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable
from pathlib import Path

from tqdm import tqdm

from sgl_det.probe.client import Facts, ProbeError
from sgl_det.soak import oracle
from sgl_det.soak.draw import Draw
from sgl_det.soak.journal import recorded
from sgl_det.soak.kinds import KINDS, plan, usable
from sgl_det.soak.load import MOST_AT_ONCE, Load
from sgl_det.soak.result import Result
from sgl_det.soak.send import Entry
from sgl_det.soak.wire import SoakServer

# Requests with an oracle: as many as these minutes are worth, within limits.
_LEAST, _A_MINUTE, _MOST = 66, 30, 330
_BAR = "{desc} |{bar:12}| {n:.0f}/{total:.0f} s"


async def soak(
    url: str,
    *,
    minutes: float,
    seed: int = 0,
    api_key: str | None = None,
    kinds: Iterable[str] | None = None,
    requests: int | None = None,
    oracle_file: str | Path | None = None,
    record_file: str | Path | None = None,
    keep_going: bool = False,
    progress: bool = True,
    timeout_s: float = 300.0,
) -> Result:
    """Compare answers under random load with answers alone and cold, for so many minutes.

    The minutes are the load's; the oracle is measured before. The server should have no other
    users: the cache is emptied now and then. kinds: names of `KINDS`, those that the server claims
    by default. requests: how many have an oracle. oracle_file: read if it is there, else written.
    record_file: where the first mismatch is written, for `replay`. keep_going: count mismatches
    instead of ending at the first. Raises, with one sentence, ProbeError when the soak cannot be
    run to its end though the server did not fail, ServerFailed when it failed before the load, and
    ValueError for an unknown kind.
    """
    async with SoakServer(url, api_key, timeout_s) as server:
        facts = await server.discover()
        chosen = _chosen(facts, kinds)
        if facts.device == "cpu":
            await server.quicken_flush()
        before = await server.retractions()
        n = requests or min(_MOST, max(_LEAST, int(_A_MINUTE * minutes)))
        bar = tqdm(total=0, disable=not progress, leave=False, mininterval=0.5, bar_format=_BAR)
        with bar:
            book, pace_s = await _oracle(server, facts, seed, n, chosen, oracle_file, bar)
            rng = random.Random(f"{seed}:load")
            load = Load(
                server=server,
                facts=facts,
                book=book,
                draw=Draw(book, rng, pace_s),
                rng=rng,
                seconds=60 * minutes,
                keep_going=keep_going,
                bar=bar,
                about={"key": facts.key, "seed": seed, "url": url, "server": recorded(facts)},
            )
            await load.run()
        if load.first and record_file:
            Path(record_file).write_text(json.dumps(load.first) + "\n")
        after = None if load.failure else await server.retractions()
        counted = None if None in (before, after) else after - before
        return _result(load, minutes, chosen, counted)


def run_soak(url: str, **kwargs) -> Result:
    """`soak` for callers without an event loop."""
    return asyncio.run(soak(url, **kwargs))


def _result(load: Load, minutes: float, chosen: list[str], counted: int | None) -> Result:
    kept = [k for k in chosen if any(e.item.kind == k for e in load.book.values())]
    return Result(
        **load.about,
        minutes=minutes,
        seconds=round(load.took_s, 1),
        oracle=len(load.book),
        tally=load.tally,
        kinds=kept,
        counted_retractions=counted,
        notes=_notes(load, chosen, kept),
        first=load.first,
        failure=load.failure,
    )


def _chosen(facts: Facts, kinds: Iterable[str] | None) -> list[str]:
    if kinds is None:
        return usable(facts)
    unknown = [k for k in kinds if k not in KINDS]
    if unknown:
        raise ValueError(f"there is no kind {unknown[0]!r}; the kinds are {', '.join(KINDS)}")
    return [k for k in KINDS if k in set(kinds)]


async def _oracle(
    server: SoakServer,
    facts: Facts,
    seed: int,
    n: int,
    kinds: list[str],
    path: str | Path | None,
    bar: tqdm,
) -> tuple[dict[str, Entry], float]:
    if path and Path(path).exists():
        book, pace_s = oracle.load(Path(path), facts.key, facts)
        book = {name: e for name, e in book.items() if e.item.kind in kinds}
        if not book:
            raise ProbeError(f"{path} holds no request of {', '.join(kinds)} that fits the server")
        return book, pace_s
    items = plan(facts, seed, n, kinds)
    bar.reset(total=len(items))
    bar.set_description_str("oracle", refresh=False)
    book, pace_s = await oracle.measured(server, items, bar.update)
    if path:
        oracle.save(Path(path), book, facts.key, seed, pace_s)
    return book, pace_s


def _notes(load: Load, chosen: list[str], kept: list[str]) -> list[str]:
    notes = [f"{k}: the server has no such route" for k in chosen if k not in kept]
    left = [k for k in KINDS if k not in chosen]
    if left:
        notes.append(f"not sent: {', '.join(left)}")
    if not load.may_retract:
        notes.append(
            "the server does not claim preemption: never more tokens than its KV pool holds"
        )
    if load.facts.max_running > MOST_AT_ONCE:
        most = load.facts.max_running
        notes.append(f"the server runs {most} at once, the soak sends {MOST_AT_ONCE}")
    return notes
