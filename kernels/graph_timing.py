"""Times of kernels in CUDA graphs: the launches cost nothing, and arms can be replayed in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A graph of the calls in their order; the last is made once before, to warm up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[-1]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    """Microseconds of one replay, the mean of several in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / repeats
