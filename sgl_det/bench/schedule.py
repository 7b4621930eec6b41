"""Which arm runs which round of which workload, in what order, and how long it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sgl_det.bench.workloads import CACHED, Workload

# Seconds on an H200 until servers started side by side answer, and to stop them.
START_S, STOP_S = 100.0, 8.0
VERDICT_S = 35.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One round of a workload on these arms, in this order. Round 0 warms up and does not count."""

    workload: str
    number: int
    arms: tuple[str, ...]
    about_s: float

    @property
    def counted(self) -> bool:
        return self.number > 0


def plan(
    workloads: Mapping[str, Workload], pair: Sequence[str], once: Sequence[str] = ()
) -> list[Step]:
    """The steps: the warm-up and the first round of every workload, then the other rounds.

    pair: the arms that alternate in every round; which of them begins changes from round to round.
    once: arms that are measured in one round only, the first. So a run that is cut short has
    something of everything.
    """
    first, rest = [], []
    for name, w in workloads.items():
        for number in range(0 if w.warm_up else 1, w.rounds + 1):
            arms = tuple(pair) if number % 2 else tuple(reversed(pair))
            if number <= 1:
                first += _steps(name, w, number, (*arms, *once))
            else:
                rest += _steps(name, w, number, arms)
    return first + rest


def _steps(name: str, w: Workload, number: int, arms: tuple[str, ...]) -> list[Step]:
    # What is prepared once is counted with the first of them.
    once = 2 if w.kind == CACHED and number <= 1 else 1
    if not arms:
        return []
    return [Step(workload=name, number=number, arms=arms, about_s=once * w.about_s * len(arms))]


def total_s(steps: Sequence[Step]) -> float:
    """Seconds of all steps, without starting and probing the servers."""
    return sum(s.about_s for s in steps)


def fixed_s() -> float:
    """Seconds to start, probe and stop servers that stand side by side."""
    return START_S + VERDICT_S + STOP_S


def later_s(groups: Sequence[Sequence[Step]]) -> float:
    """Seconds of groups of one server each that come after the first: all of it."""
    alone = 0.6 * START_S + VERDICT_S + STOP_S
    return sum(alone + total_s(steps) for steps in groups)


def fitting(steps: Sequence[Step], seconds: float | None) -> tuple[list[Step], list[Step]]:
    """(steps that fit into so many seconds, the others), as far as the estimates tell."""
    if seconds is None:
        return list(steps), []
    inside, outside, used = [], [], 0.0
    for step in steps:
        fits = used + step.about_s <= seconds
        (inside if fits else outside).append(step)
        used += step.about_s if fits else 0.0
    return inside, outside


def described(groups: Sequence[Sequence[Step]], seconds: float | None) -> list[str]:
    """The plan as lines: what runs in order, with its time, and what does not fit.

    groups: the steps of servers that stand side by side; then of servers that come after them,
    whose time is kept free.
    """
    first, *later = groups
    left = None if seconds is None else seconds - fixed_s() - later_s(later)
    inside, outside = fitting(first, left)
    lines = [f"{fixed_s():6.0f} s  start, probe and stop the servers"]
    lines += [_described(s, "" if s in inside else "  (does not fit)") for s in first]
    for steps in later:
        lines.append(f"{later_s([[]]):6.0f} s  start, probe and stop the next server")
        lines += [_described(s) for s in steps]
    if outside:
        lines.append(f"          left out for lack of time: {len(outside)} rounds")
    whole = fixed_s() + total_s(inside) + later_s(later)
    limit = "" if seconds is None else f" of {seconds:.0f}"
    return [*lines, f"{whole:6.0f} s{limit}  in all, by the times of an H200"]


def _described(step: Step, more: str = "") -> str:
    what = f"round {step.number}" if step.counted else "warm-up"
    return f"{step.about_s:6.0f} s  {step.workload} {what}: {', '.join(step.arms)}{more}"
