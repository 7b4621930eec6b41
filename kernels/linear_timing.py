"""How long each kernel takes for a layer: CUDA graphs, over weights that are not in the L2 cache.

Timing may change which kernel serves, never the bits. A quick look says which kernels are worth a
proof; those proven are then timed in turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch

from sgl_det.kernels.graph_timing import captured, replay_us
from sgl_det.kernels.linear_candidates import RAISED, Candidate, Shape
from sgl_det.kernels.linear_data import operands

ROUNDS, LEAST_US = 5, 150.0
# What a quick look keeps: so many kernels, and none this much slower than the fastest.
_SHORT, _SLOWER = 5, 1.3


class Timer:
    """Times candidates of one layer, in turn; weights are rotated beyond the L2 cache."""

    def __init__(self, shape: Shape, most_rows: int):
        cache = torch.cuda.get_device_properties(0).L2_cache_size
        size = shape.n * shape.k * shape.dtype.itemsize
        self.copies = max(1, min(32, -(-2 * cache // size)))
        self.x, weight, self.bias = operands("realistic", shape, most_rows, "cuda")
        self.weights = [weight, *(weight.clone() for _ in range(self.copies - 1))]

    def shortlist(self, candidates: Sequence[Candidate], m: int) -> list[Candidate]:
        """Those that a single replay finds fast for m rows, fastest first; none that raises."""
        times: dict[Candidate, float] = {}
        for candidate in candidates:
            try:
                graph = captured(self._calls(candidate, m))
            except RAISED:
                continue
            replay_us(graph, 1)
            times[candidate] = replay_us(graph, 1)
        ranked = sorted(times, key=times.get)
        return [c for c in ranked[:_SHORT] if times[c] <= _SLOWER * times[ranked[0]]]

    def fastest(self, candidates: Sequence[Candidate], m: int) -> tuple[str, float]:
        """(name, microseconds) of the fastest candidate for m rows."""
        graphs = {c.name: captured(self._calls(c, m)) for c in candidates}
        times: dict[str, list[float]] = {name: [] for name in graphs}
        repeats = dict.fromkeys(graphs, 1)
        for i in range(ROUNDS + 1):
            for name, graph in graphs.items():
                us = replay_us(graph, repeats[name]) / self.copies
                if i:
                    times[name].append(us)
                else:  # the first replay warms up and says how often to repeat
                    repeats[name] = max(1, round(LEAST_US / max(us * self.copies, 1e-3)))
        found = {name: statistics.median(t) for name, t in times.items()}
        name = min(found, key=found.get)
        return name, found[name]

    def _calls(self, candidate: Candidate, m: int) -> list[Callable[[], object]]:
        return [partial(candidate.run, self.x[:m], weight, self.bias) for weight in self.weights]
