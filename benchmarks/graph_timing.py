"""Times of kernels that do the same work: CUDA graphs, replayed in turn, the median of each."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from sgl_det.kernels.graph_timing import captured, replay_us

ROUNDS, LEAST_US, KEPT = 7, 250, 5
# Operands of this many bytes are not in the L2 cache when their turn comes again.
_BEYOND_L2, _MOST_COPIES = 200_000_000, 64


def copies(size: int) -> int:
    """How many copies of operands of ``size`` bytes to use in turn."""
    return max(2, min(_MOST_COPIES, -(-_BEYOND_L2 // size)))


class Arm:
    """One kernel in a CUDA graph of several calls, each with other copies of the operands.

    calls        kept as long as the graph, which reads and writes the memory of their tensors
    mismatches   counts the elements or rows that differ from the right ones, or None where there
                 are none to compare; asked of the fast arms only
    """

    def __init__(
        self, name: str, calls: Sequence[Callable[[], object]], mismatches: Callable[[], int | None]
    ):
        self.name, self.calls, self._count = name, tuple(calls), mismatches
        self.times: list[float] = []
        self.graph = captured(self.calls)

    def measure(self, repeats: int) -> None:
        self.times.append(replay_us(self.graph, repeats) / len(self.calls))

    @cached_property
    def mismatches(self) -> int | None:
        return self._count()

    @property
    def us(self) -> float:
        return statistics.median(self.times)


def in_turn(make: dict[str, Callable[[], Arm]]) -> dict[str, Any]:
    """Make every arm and measure the first, which is the baseline, and the fast ones in turn.

    Returns {"arms": {name: [us, mismatches]}, "spread", "errors"}. Raises TimeoutError where an
    alarm does, and RuntimeError where an arm fails that was measured before.
    """
    arms, errors = [], {}
    for name, make_arm in make.items():
        try:
            arm = make_arm()
            arm.measure(1)
            arm.measure(1)
            arms.append(arm)
        except TimeoutError:
            raise
        except Exception as error:  # whatever a library raises, the other arms are measured
            errors[name] = _first_line(error)
    arms = _worth_measuring(arms, next(iter(make)))
    _measure(arms, errors)
    return {
        "arms": {a.name: [round(a.us, 3), a.mismatches] for a in arms},
        "spread": round(max((max(a.times) / min(a.times) for a in arms), default=1) - 1, 3),
        "errors": errors,
    }


def _measure(arms: Sequence[Arm], errors: dict[str, str]) -> None:
    """Measure the arms in turn. Where one fails, the error names it and the errors before it."""
    once = arms[0].times[-1] * len(arms[0].calls) if arms else LEAST_US
    for arm in arms:
        arm.times.clear()
    for _ in range(ROUNDS):
        for arm in arms:
            try:
                arm.measure(max(1, round(LEAST_US / max(1e-3, once))))
            except RuntimeError as error:
                before = f"; before it {errors}" if errors else ""
                raise RuntimeError(f"{arm.name}: {_first_line(error)}{before}") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


def _worth_measuring(arms: Sequence[Arm], baseline: str) -> list[Arm]:
    """The baseline, the fastest few whose bits are right, and what is faster but wrong."""
    kept, good = [a for a in arms if a.name == baseline], 0
    others = [a for a in arms if a.name != baseline]
    for arm in sorted(others, key=lambda a: a.times[-1]):
        if good == KEPT:
            break
        kept.append(arm)
        good += not arm.mismatches
    return kept
