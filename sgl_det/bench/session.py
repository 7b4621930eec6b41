"""One sitting: start the arms, probe them, carry the plan out, write the results as they come."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import requests

from sgl_det.bench import arms, client, results, schedule
from sgl_det.bench.arms import DETERMINISTIC, OURS, Settings
from sgl_det.bench.runner import Runner
from sgl_det.bench.verdict import BITWISE, verdicts
from sgl_det.bench.workloads import CPU_SCALE, SATURATION, WARM_UP, Workload
from sgl_det.server_process import ServerProcess

NO_RADIX = "the prefix cache is off in this arm"


@dataclass
class Session:
    """What a sitting measures, and where it goes.

    arms     of `arms.ARMS`; normal and sgl_det alternate, the deterministic one is measured once
    out      the folder of e2e.json, the lines and the logs
    seconds  the whole sitting's limit, starting and probing included; None for none
    again    measure also what e2e.json has under this key
    say      gets lines for people
    """

    settings: Settings
    workloads: Mapping[str, Workload]
    arms: Sequence[str]
    out: Path
    seconds: float | None = None
    scale: int = 1
    verdict_s: float = 30.0
    again: bool = True
    say: Callable[[str], None] = lambda line: None
    head: dict[str, str] = field(default_factory=lambda: {"key": ""})
    document: dict[str, Any] = field(default_factory=dict)
    verdict: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.head |= {"backend": self.settings.backend, "model": self.settings.model}

    def groups(self) -> list[tuple[str, ...]]:
        return arms.groups(self.arms, self.settings)

    def steps(self, group: Sequence[str], done: Sequence[str] = ()) -> list[schedule.Step]:
        """The steps of the servers of one group, without workloads that are done."""
        left = {n: w for n, w in self.workloads.items() if n not in done}
        pair = [a for a in group if a != DETERMINISTIC]
        return schedule.plan(left, pair, [a for a in group if a == DETERMINISTIC])

    def run(self) -> bool:
        """The sitting. True where the sgl_det arm was bitwise, or not among the arms."""
        begun = time.monotonic()
        deadline = None if self.seconds is None else begun + self.seconds - schedule.STOP_S
        self.out.mkdir(parents=True, exist_ok=True)
        # SGLang's client takes some seconds to import, which the servers need for their start.
        threading.Thread(target=client.sglang_client, daemon=True).start()
        lines = self.out / f"{self.settings.backend}.jsonl"
        lines.unlink(missing_ok=True)
        runner = Runner(self.workloads, lines)
        groups = self.groups()
        for i, group in enumerate(groups):
            later = schedule.later_s([self.steps(g) for g in groups[i + 1 :]])
            runner.deadline = None if deadline is None else deadline - later
            if i and deadline is not None and time.monotonic() + schedule.START_S > deadline:
                self.say(f"{', '.join(group)}: left out, no time to start another server")
            else:
                self._group(group, runner)
        for name, n in runner.skipped.items():
            self.say(f"{name}: {n} rounds left out for lack of time")
        return self.verdict.get(OURS, BITWISE) == BITWISE

    def _group(self, group: Sequence[str], runner: Runner) -> None:
        servers = {arm: self.settings.server(arm) for arm in group}
        self.say(f"starting {', '.join(group)}; logs are in {self.out}")
        with arms.beside(servers) as (ready, failed):
            for arm, reason in failed.items():
                self.say(f"{arm} did not start and is left out: {reason}")
            up = {arm: servers[arm] for arm in ready}
            about = {arm: arms.about_server(s, self.settings.model) for arm, s in up.items()}
            arms.check_pools(about)
            self._begin(up, ready, about)
            urls = {arm: s.url for arm, s in up.items()}
            found, told = verdicts(urls, self.verdict_s)
            self.verdict |= found
            for arm, text in told.items():
                self.say(f"{arm}: ready in {ready[arm]} s, {found[arm]}: {text}")
            runner.alone = lambda arm: arms.alone(up, arm)
            ids = arms.vocabulary(urls.get(OURS) or next(iter(urls.values())))
            runner.workloads = {n: w.within(ids) for n, w in self.workloads.items()}
            on_cpu = self.settings.backend == arms.CPU_BACKEND
            scale = max(self.scale, CPU_SCALE) if on_cpu else self.scale
            runner.warm_up(urls, WARM_UP.scaled(scale).within(ids))
            done = self._done(list(up))
            self.notes |= {a: NO_RADIX for a, i in about.items() if i["disable_radix_cache"]}
            runner.run(self.steps(group, done), urls, lambda step: self._keep(runner))

    def _done(self, group: Sequence[str]) -> list[str]:
        """Workloads that all arms of a group have under this key, unless they are to be repeated.

        An arm that is measured once needs one round, the others all of theirs.
        """
        if self.again:
            return []
        found = [n for n, w in self.workloads.items() if all(self._has(a, n, w) for a in group)]
        if any(w.of_capacity and n not in found for n, w in self.workloads.items()):
            found = [n for n in found if n != SATURATION]
        if found:
            key = self.head["key"]
            self.say(f"measured before under key {key}, left out: {', '.join(found)}")
        return found

    def _has(self, arm: str, name: str, w: Workload) -> bool:
        backend, key, model = (self.head[n] for n in ("backend", "key", "model"))
        rounds = results.rounds_under(self.document["rows"], backend, arm, key, model)
        return rounds.get(name, 0) >= (1 if arm == DETERMINISTIC else w.rounds)

    def _begin(
        self, up: Mapping[str, ServerProcess], ready: Mapping[str, float], about: Mapping[str, Any]
    ) -> None:
        if OURS in up:
            self._identify(up[OURS])
        figures = {
            arm: {"ready_s": ready[arm], "kv_tokens": i["max_total_num_tokens"]}
            | {"host_gb": arms.host_memory_gb(up[arm])}
            for arm, i in about.items()
        }
        self._merge(results.facts(results.BESIDE, figures, self.head), about)

    def _identify(self, ours: ServerProcess) -> None:
        """The numerics key, as our server tells it."""
        told = requests.get(f"{ours.url}/determinism", timeout=60).json()
        name = f"{self.settings.backend}.determinism.json"
        (self.out / name).write_text(json.dumps(told, indent=1) + "\n")
        self.head["key"] = told["key"]

    def _keep(self, runner: Runner) -> None:
        made = results.rows(runner.measured, self.workloads, self.head, self.verdict, self.notes)
        self._merge(made)

    def _merge(self, rows: list[dict[str, Any]], about: Mapping[str, Any] | None = None) -> None:
        servers = [
            {"backend": self.head["backend"], "arm": arm, "key": self.head["key"], **info}
            for arm, info in (about or {}).items()
        ]
        new = {"gpu": self.head.setdefault("gpu", arms.machine()), "rows": rows, "servers": servers}
        self.document = results.merged(self.document or results.load(self.out), new)
        results.write(self.out, self.document)

    def capacity(self) -> None:
        """Each arm alone on the machine, without a bound: start-up, KV tokens and memory."""
        self.out.mkdir(parents=True, exist_ok=True)
        unbounded = replace(self.settings, pool=None)
        # Ours first: it tells the key, which the rows of all arms have.
        for arm in sorted(self.arms, key=lambda a: a != OURS):
            server = unbounded.server(arm, "capacity")
            with arms.beside({arm: server}) as (ready, _):
                if arm == OURS:
                    self._identify(server)
                about = arms.about_server(server, unbounded.model)
                found = {"ready_s": ready[arm], "kv_tokens": about["max_total_num_tokens"]}
                found |= arms.memory_gb(server)
            self.say(f"{arm} alone: {found}")
            self._merge(results.facts(results.ALONE, {arm: found}, self.head))
