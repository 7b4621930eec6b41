"""What ``bench_server.py`` sends to two servers in turn, and the rows that come of it."""

from __future__ import annotations

import json
import random
import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import requests

ARMS = ("normal", "sgl_det")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is sent at once, and how often.

    cached   decode alone: the prompts are put into the prefix cache before, and the time of the
             same request for one token is taken off
    rounds   in all; with warm_up the first of them is not counted
    about_s  of both arms on an H200, with what a round needs before; the time limit goes by it
             until a round was measured
    ids      token ids are below it
    """

    many: int
    prompt: int
    new: int
    cached: bool = False
    rounds: int = 4
    warm_up: bool = True
    about_s: float = 5.0
    ids: int = 100_000

    def scaled(self, by: int) -> Workload:
        """A smaller one, for a machine without a GPU; equal for 1."""
        if by == 1:
            return self
        many, prompt, new = (-(-n // by) for n in (self.many, self.prompt, self.new))
        return replace(self, many=many, prompt=max(8, prompt), new=new, about_s=0.0, ids=256)


WORKLOADS = {
    "decode_bs1": Workload(many=1, prompt=128, new=256),
    "decode_bs16": Workload(many=16, prompt=128, new=256),
    "decode_bs1_32k": Workload(many=1, prompt=32_768, new=256, cached=True),
    "decode_bs4_32k": Workload(many=4, prompt=32_768, new=256, cached=True, about_s=20.0),
    "prefill_8x16384": Workload(many=8, prompt=16_384, new=1, about_s=12.0),
    "throughput_256x1024": Workload(
        many=256, prompt=1024, new=1024, rounds=2, warm_up=False, about_s=65.0
    ),
    "prefill_256x1024": Workload(many=256, prompt=1024, new=1, about_s=13.0),
}
DEFAULT = [name for name in WORKLOADS if name != "prefill_256x1024"]
WARM_UP = Workload(many=32, prompt=512, new=16)


def send(url: str, w: Workload, seed: object, new: int | None = None) -> tuple[float, int]:
    """Seconds of a workload in one request, and the fewest tokens that a prompt had in the cache.

    The seed decides the prompts; new is another number of new tokens. Raises requests.HTTPError
    where the server refuses.
    """
    rng = random.Random(str(seed))
    body = {
        "input_ids": [[rng.randrange(w.ids) for _ in range(w.prompt)] for _ in range(w.many)],
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": new or w.new,
            "ignore_eos": True,
        },
    }
    text, kind = json.dumps(body), {"Content-Type": "application/json"}
    begun = time.perf_counter()
    reply = requests.post(f"{url}/generate", data=text, headers=kind, timeout=600)
    seconds = time.perf_counter() - begun
    reply.raise_for_status()
    return seconds, min(r["meta_info"]["cached_tokens"] for r in reply.json())


def flush(url: str) -> None:
    """Empty a server's prefix cache."""
    requests.post(f"{url}/flush_cache?timeout=20", timeout=60).raise_for_status()


def one_round(url: str, w: Workload, name: str, number: int) -> tuple[float, int]:
    """As `send`: decode alone on a prefix in the cache, or all of it on an empty cache."""
    if w.cached:
        first, _ = send(url, w, name, 1)
        seconds, cached = send(url, w, name)
        return seconds - first, cached
    flush(url)
    return send(url, w, f"{number} {name}")


@dataclass
class Bench:
    """Drives both servers and keeps what was measured.

    workloads  name -> Workload, as they are measured
    deadline   of time.monotonic(): no round begins that may not end before; None for no limit
    measured   one record a measurement: workload, arm, round, seconds, warm_up, cached
    """

    urls: dict[str, str]
    workloads: dict[str, Workload]
    lines: Path
    deadline: float | None = None
    measured: list[dict[str, Any]] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)

    def warm_up(self, scale: int) -> None:
        """Let both compile what their first requests compile."""
        for url in self.urls.values():
            send(url, WARM_UP.scaled(scale), "warm up")

    def schedule(self) -> list[tuple[str, list[int]]]:
        """Which rounds of which workload, in order: one counted round of each, then the rest."""
        first = {name: 1 + w.warm_up for name, w in self.workloads.items()}
        whole = {name: list(range(w.rounds)) for name, w in self.workloads.items()}
        rest = [(name, whole[name][n:]) for name, n in first.items()]
        return [*((name, whole[name][:n]) for name, n in first.items()), *(r for r in rest if r[1])]

    def run(self, name: str, rounds: list[int]) -> None:
        """Rounds of one workload; the arms take turns."""
        w, about = self.workloads[name], self.workloads[name].about_s
        if w.cached and not self.late(about):
            for url in self.urls.values():
                flush(url)
                send(url, w, name, 1)
            about /= 4
        for i, number in enumerate(rounds):
            if self.late(about):
                self.skipped[name] = self.skipped.get(name, 0) + len(rounds) - i
                return
            begun = time.monotonic()
            for arm, url in self.urls.items():
                self.record(name, arm, number, *one_round(url, w, name, number))
            about = time.monotonic() - begun

    def late(self, seconds: float) -> bool:
        """Whether what takes so long would end after the deadline."""
        return self.deadline is not None and time.monotonic() + seconds > self.deadline

    def record(self, name: str, arm: str, number: int, seconds: float, cached: int) -> None:
        """Keep a measurement, and write it down at once."""
        line = {"workload": name, "arm": arm, "round": number, "seconds": round(seconds, 4)}
        line |= {"warm_up": self.workloads[name].warm_up and number == 0, "cached": cached}
        self.measured.append(line)
        with self.lines.open("a") as out:
            print(json.dumps(line), file=out, flush=True)

    def rows(self, head: dict[str, str]) -> list[dict[str, Any]]:
        """One row a workload: medians, and the ratio normal / ours of the speeds, paired by round.

        Without a ratio where the verdict is not bitwise, or where prompts that should have come
        from the prefix cache did not.
        """
        return [r for name in self.workloads if (r := self._row(name, head))]

    def _row(self, name: str, head: dict[str, str]) -> dict[str, Any] | None:
        mine = [m for m in self.measured if m["workload"] == name and not m["warm_up"]]
        by = {arm: {m["round"]: m for m in mine if m["arm"] == arm} for arm in ARMS}
        both = sorted(set.intersection(*(set(found) for found in by.values())))
        if not both:
            return None
        seconds = {arm: [by[arm][n]["seconds"] for n in both] for arm in ARMS}
        row = {"backend": head["backend"], "workload": name, **head, "rounds": len(both)}
        row |= {f"{arm}_s": round(statistics.median(v), 3) for arm, v in seconds.items()}
        w = self.workloads[name]
        cold = {m["arm"] for m in mine if w.cached and m["cached"] < 0.9 * w.prompt}
        if cold:
            return row | {"note": f"{', '.join(sorted(cold))}: prompts not read from the cache"}
        if head["verdict"] == "bitwise":
            ratios = sorted(a / b for a, b in zip(*seconds.values(), strict=True))
            row |= {"speed_ratio": round(statistics.median(ratios), 3)}
            row |= {"min": round(ratios[0], 3), "max": round(ratios[-1], 3)}
        return row
