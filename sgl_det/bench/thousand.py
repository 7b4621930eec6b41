"""One prompt a thousand times at temperature 0, under other people's load: how many answers?

The copies are sent in waves, few or many at once, beside a background of requests of mixed lengths,
some of them sampled, by a number of users that changes from wave to wave. The completions are
compared as token ids.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

NAME = "thousand.json"
PROMPT = "Tell me about Richard Feynman"
_ID = ("backend", "arm", "model", "count", "tokens")
_TIMEOUT_S = 900
_LENGTHS = (8, 60, 250, 700, 1500, 3000)  # of the background's prompts, in tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """count completions of `tokens` tokens; at most `in_flight` of them at once.

    background  users at most, each of whom sends a request after the other, of up to 3000 tokens
                for up to 512, divided by scale; lengths and texts follow from seed
    ids         the background's token ids are below it
    seconds     no wave begins later; None for no limit
    """

    count: int = 1000
    tokens: int = 1000
    in_flight: int = 104
    background: int = 24
    scale: int = 1
    ids: int = 250
    seed: int = 0
    prompt: str = PROMPT
    seconds: float | None = None


def waves(e: Experiment) -> list[tuple[int, int]]:
    """(copies at once, users of the background beside them) of each wave; it follows from seed."""
    rng, found, left = random.Random(f"{e.seed} waves"), [], e.count
    sizes = [max(1, e.in_flight // n) for n in (e.in_flight, 4, 2, 1, 1)]
    while left:
        found.append((min(left, rng.choice(sizes)), rng.randint(0, e.background)))
        left -= found[-1][0]
    return found


def outcome(completions: Counter[tuple[int, ...]]) -> dict[str, Any]:
    """What completions tell: how many are distinct, and where they leave the most frequent one.

    completions: token ids -> how often. divergences: (first other token, how many completions),
    ascending; first_divergence is None where all are equal.
    """
    if not completions:
        raise ValueError("there is no completion to compare; give the experiment more seconds")
    usual, times = completions.most_common(1)[0]
    places: Counter[int] = Counter()
    for other, n in completions.items():
        if other != usual:
            places[_first_difference(usual, other)] += n
    return {
        "completions": completions.total(),
        "distinct": len(completions),
        "most_frequent": times,
        "first_divergence": min(places, default=None),
        "divergences": sorted(places.items()),
    }


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def run(url: str, e: Experiment, progress: Callable[[int], None] = lambda n: None) -> dict:
    """The experiment on one server: its `outcome`, its seconds, the background's requests.

    progress gets the number of copies that came back, each time one does. Raises RuntimeError
    where the server refuses a request.
    """
    return asyncio.run(experiment(url, e, progress))


async def experiment(
    url: str, e: Experiment, progress: Callable[[int], None] = lambda n: None
) -> dict[str, Any]:
    """`run` for callers with an event loop."""
    found: Counter[tuple[int, ...]] = Counter()
    begun = time.perf_counter()
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        users = [_User(session, url, e, i) for i in range(e.background)]
        others = {asyncio.create_task(user.run()) for user in users}

        async def copy() -> None:
            ids = await _generate(session, url, {"text": e.prompt}, e.tokens, 0.0)
            found[tuple(ids)] += 1
            progress(found.total())

        wave = None
        try:
            for copies, active in waves(e):
                if e.seconds is not None and time.perf_counter() - begun > e.seconds:
                    break
                for i, user in enumerate(users):
                    (user.active.set if i < active else user.active.clear)()
                wave = asyncio.gather(*(copy() for _ in range(copies)))
                done, _ = await asyncio.wait({wave, *others}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:  # a user ends only by failing
                    task.result()
        finally:
            left = [*others, wave] if wave else list(others)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
    seconds = round(time.perf_counter() - begun, 1)
    return outcome(found) | {
        "seconds": seconds,
        "background_requests": sum(u.served for u in users),
    }


class _User:
    """One user of the background, who sends a request after the other while active."""

    def __init__(self, session: aiohttp.ClientSession, url: str, e: Experiment, number: int):
        self._session, self._url, self._e = session, url, e
        self._rng = random.Random(f"{e.seed} {number}")
        self.active, self.served = asyncio.Event(), 0

    async def run(self) -> None:
        e, rng = self._e, self._rng
        while True:
            await self.active.wait()
            length = max(4, rng.choice(_LENGTHS) // e.scale)
            ids = [rng.randrange(e.ids) for _ in range(length)]
            new = max(4, rng.randrange(16, 513) // e.scale)
            temperature = rng.choice((0.0, 0.0, 1.0))
            await _generate(self._session, self._url, {"input_ids": ids}, new, temperature)
            self.served += 1


async def _generate(
    session: aiohttp.ClientSession,
    url: str,
    prompt: Mapping[str, Any],
    new: int,
    temperature: float,
) -> list[int]:
    params = {"temperature": temperature, "max_new_tokens": new, "ignore_eos": True}
    body = {**prompt, "sampling_params": params}
    async with session.post(f"{url}/generate", json=body) as reply:
        if reply.status != 200:
            text = " ".join((await reply.text()).split())[:200]
            raise RuntimeError(f"{url}/generate answered {reply.status}, expected 200: {text}")
        return (await reply.json())["output_ids"]


def row(head: Mapping[str, str], arm: str, e: Experiment, found: Mapping[str, Any]) -> dict:
    """A row of thousand.json; head: backend, model and key."""
    names = ("backend", "model", "key")
    return {n: head[n] for n in names} | {"arm": arm} | asdict(e) | dict(found)


def write(folder: Path, gpu: str, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put rows into a folder's thousand.json in the place of those of equal arm, model and sizes.

    Returns all rows. Raises ValueError where the file is of another machine.
    """
    path = folder / NAME
    old = (
        json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"gpu": gpu, "rows": []}
    )
    if old["gpu"] != gpu:
        raise ValueError(f"{path} is of {old['gpu']!r}, not of {gpu!r}; name another folder")
    fresh = {tuple(r[f] for f in _ID) for r in rows}
    kept = [r for r in old["rows"] if tuple(r[f] for f in _ID) not in fresh]
    everything = [*kept, *rows]
    lines = ",\n".join(f"  {json.dumps(r)}" for r in everything)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'{{\n "gpu": {json.dumps(gpu)},\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8"
    )
    return everything
