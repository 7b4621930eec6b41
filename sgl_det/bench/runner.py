"""Carries the steps of a plan out on running servers, and keeps what was measured."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sgl_det.bench import client
from sgl_det.bench.arms import NORMAL
from sgl_det.bench.client import Sample
from sgl_det.bench.schedule import Step
from sgl_det.bench.workloads import BATCH, CACHED, SATURATION, WARM_UP, Workload


@dataclass
class Runner:
    """Drives the arms through steps.

    lines     a file that gets one JSON line a measurement, as they come
    deadline  of time.monotonic(): no step begins that may not end before; None for no limit
    alone     arm -> a context in which only that arm takes time
    measured  records: workload, arm, round, counted, metrics, cached, quantiles
    skipped   workload -> rounds that did not fit
    """

    workloads: Mapping[str, Workload]
    lines: Path
    deadline: float | None = None
    alone: Callable[[str], AbstractContextManager] = lambda arm: nullcontext()
    measured: list[dict[str, Any]] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    _took: dict[tuple[str, str], float] = field(default_factory=dict)
    _prepared: set[tuple[str, str]] = field(default_factory=set)

    def warm_up(self, urls: Mapping[str, str], w: Workload = WARM_UP) -> None:
        """Let the servers compile what their first requests compile."""
        for arm, url in urls.items():
            with self.alone(arm):
                client.send_batch(url, w, "warm up")

    def run(
        self, steps: Sequence[Step], urls: Mapping[str, str], after: Callable[[Step], None]
    ) -> None:
        """The steps on these servers, with a bar; arms without a server are left out.

        after is called after each step that was carried out.
        """
        whole = sum(s.about_s or 1.0 for s in steps)
        form = "{desc}{percentage:3.0f}% |{bar}| {elapsed} gone, {remaining} left"
        with tqdm(total=whole, bar_format=form, mininterval=0.5) as bar:
            for step in steps:
                bar.set_description(f"{step.workload} {step.number}")
                if self.late(step, urls):
                    self.skipped[step.workload] = self.skipped.get(step.workload, 0) + 1
                else:
                    for arm in step.arms:
                        if arm in urls:
                            self._one(step, arm, urls[arm])
                    after(step)
                bar.update(step.about_s or 1.0)

    def late(self, step: Step, urls: Mapping[str, str]) -> bool:
        """Whether a step would end after the deadline, by what was measured or else estimated."""
        share = step.about_s / max(1, len(step.arms))
        arms = [a for a in step.arms if a in urls]
        needed = sum(self._took.get((step.workload, arm), share) for arm in arms)
        return self.deadline is not None and time.monotonic() + needed > self.deadline

    def _one(self, step: Step, arm: str, url: str) -> None:
        w, name = self.workloads[step.workload], step.workload
        begun = time.monotonic()
        with self.alone(arm):
            if w.kind == CACHED and (name, arm) not in self._prepared:
                client.flush(url)
                client.send_batch(url, w, name, 1)
                self._prepared.add((name, arm))
                begun = time.monotonic()
            sample = self._send(w, step, arm, url)
        self._took[name, arm] = time.monotonic() - begun
        self.record(step, arm, sample)

    def _send(self, w: Workload, step: Step, arm: str, url: str) -> Sample:
        if w.kind == CACHED:
            first = client.send_batch(url, w, step.workload, 1).metrics["seconds"]
            sample = client.send_batch(url, w, step.workload)
            seconds = sample.metrics["seconds"] - first
            return Sample(metrics={"seconds": seconds}, cached=sample.cached)
        client.flush(url)
        self._prepared = {(name, other) for name, other in self._prepared if other != arm}
        seed = f"{step.number} {step.workload}"
        if w.kind == BATCH:
            return client.send_batch(url, w, seed)
        return client.send_load(url, w, seed, self.rate(w))

    def rate(self, w: Workload) -> float | None:
        """Requests per second, by the normal arm's capacity; None: all at once.

        Raises RuntimeError where the capacity was not measured before.
        """
        if w.of_capacity is None:
            return None
        found = [
            self.workloads[SATURATION].many / m["metrics"]["seconds"]
            for m in self.measured
            if (m["workload"], m["arm"]) == (SATURATION, NORMAL)
        ]
        if not found:
            raise RuntimeError(f"{SATURATION} has no measurement of {NORMAL}, which sets the rate")
        return w.of_capacity * found[-1]

    def record(self, step: Step, arm: str, sample: Sample) -> None:
        """Keep a measurement, and write it down at once."""
        line = {"workload": step.workload, "arm": arm, "round": step.number}
        metrics = {n: round(v, 4) for n, v in sample.metrics.items()}
        line |= {"counted": step.counted, "metrics": metrics, "cached": sample.cached}
        line |= {"quantiles": sample.quantiles} if sample.quantiles else {}
        self.measured.append(line)
        with self.lines.open("a") as out:
            out.write(json.dumps(line) + "\n")
