"""The GPU work in a trace that PyTorch's profiler wrote: names, calls, time, graph replays."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_det.audit.names import canonical

GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_REPLAYS = ("cudaGraphLaunch", "cuGraphLaunch")


@dataclass(frozen=True, slots=True)
class Seen:
    """One kernel: canonical name, calls, those of them in CUDA graphs, microseconds together."""

    name: str
    calls: int
    captured: int
    total_us: float


def read_folder(folder: Path) -> list[dict[str, Any]]:
    """The events of every trace in a folder. ValueError if there is none."""
    paths = sorted([*folder.glob("*.json"), *folder.glob("*.json.gz")])
    if not paths:
        raise ValueError(f"the profiler left no trace in {folder}")
    return [event for path in paths for event in read(path)]


def read(path: Path) -> list[dict[str, Any]]:
    """The events of one trace in Chrome's format. ValueError if it is none."""
    opened = gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")
    with opened as file:
        try:
            found = json.load(file)
        except (ValueError, OSError, EOFError) as error:
            raise ValueError(f"{path} is no trace that can be read: {error}") from None
    events = found.get("traceEvents") if isinstance(found, dict) else None
    if not isinstance(events, list):
        raise ValueError(f"{path} is no trace: it has no traceEvents")
    return events


def kernels(
    events: Iterable[dict[str, Any]], categories: tuple[str, ...] = GPU
) -> tuple[Seen, ...]:
    """What ran, one entry a name, the longest first.

    A kernel of a replayed graph has the correlation id of the launch of its graph; newer profilers
    also name the graph.
    """
    events = [e for e in events if e.get("ph") == "X"]
    replays = {
        e.get("args", {}).get("correlation")
        for e in events
        if str(e.get("name", "")).startswith(_REPLAYS)
    } - {None}
    found: dict[str, list[float]] = {}
    for event in events:
        if event.get("cat") not in categories:
            continue
        args = event.get("args", {})
        captured = args.get("correlation") in replays or bool(args.get("graph id"))
        sums = found.setdefault(canonical(event["name"]), [0, 0, 0.0])
        sums[0] += 1
        sums[1] += captured
        sums[2] += float(event.get("dur", 0))
    seen = (Seen(n, int(c), int(g), round(us, 3)) for n, (c, g, us) in found.items())
    return tuple(sorted(seen, key=lambda s: (-s.total_us, s.name)))
