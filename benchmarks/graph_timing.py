"""Times of kernels that do the same work: CUDA graphs, replayed in turn, the median of each."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from sgl_det.kernels.graph_timing import captured, replay_us

ROUNDS, LEAST_US = 7, 250
# Operands of this many bytes are not in the L2 cache when their turn comes again.
_BEYOND_L2, _MOST_COPIES = 200_000_000, 64


def copies(size: int) -> int:
    """How many copies of operands of ``size`` bytes to use in turn."""
    return max(2, min(_MOST_COPIES, -(-_BEYOND_L2 // size)))


class Arm:
    """One kernel in a CUDA graph of several calls, each with other copies of the operands."""

    def __init__(self, name: str, calls: Sequence[Callable[[], object]], mismatches: int):
        self.name, self.mismatches, self.calls = name, mismatches, len(calls)
        self.times: list[float] = []
        self.graph = captured(calls)

    def measure(self, repeats: int) -> None:
        self.times.append(replay_us(self.graph, repeats) / self.calls)

    @property
    def us(self) -> float:
        return statistics.median(self.times)


def in_turn(make: dict[str, Callable[[], Arm]]) -> dict[str, Any]:
    """Make every arm and measure all: {"arms": {name: [us, mismatches]}, "spread", "errors"}."""
    arms, errors = [], {}
    for name, make_arm in make.items():
        try:
            arms.append(make_arm())
        except Exception as error:  # whatever a library raises, the other arms are measured
            errors[name] = (str(error).splitlines() or [type(error).__name__])[0][:120]
    for arm in arms:
        arm.measure(1)
    once = arms[0].times[-1] * arms[0].calls if arms else LEAST_US
    repeats = max(1, round(LEAST_US / max(1e-3, once)))
    for arm in arms:
        arm.times.clear()
    for _ in range(ROUNDS):
        for arm in arms:
            arm.measure(repeats)
    return {
        "arms": {a.name: [round(a.us, 3), a.mismatches] for a in arms},
        "spread": round(max((max(a.times) / min(a.times) for a in arms), default=1) - 1, 3),
        "errors": errors,
    }
