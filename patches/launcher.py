"""What the launcher's process checks before it lets the server answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from sgl_det.patch import Patch, PatchError


def _checked(original, ready):
    @wraps(original)
    def _wait_for_scheduler_ready(scheduler_pipe_readers, scheduler_procs):
        infos = original(scheduler_pipe_readers, scheduler_procs)
        for rank, info in enumerate(infos):
            report = info.get("sgl_det")
            if report is None:
                raise PatchError(
                    f"scheduler {rank} answered without our report, so its patches are not known "
                    f"to hold; check that the sgl_det plugin is loaded in worker processes"
                )
            if report["problem"]:
                raise PatchError(report["problem"])
        ready(infos[0]["sgl_det"])
        return infos

    return _wait_for_scheduler_ready


def patches(ready: Callable[[dict[str, Any]], None]) -> tuple[Patch, ...]:
    """The patches of the process that starts the workers, besides those for requests.

    ready   called with the first worker's report; what it raises stops the server
    """
    return (
        Patch(
            name="launcher.worker_report",
            target="sglang.srt.entrypoints.engine:_wait_for_scheduler_ready",
            requires="sglang>=0.5.17,<0.5.18",
            fingerprints=("baadf5b2923f",),
            why="no server or engine is ready before each worker has shown that its patches hold",
            upstream="none: SGLang's plugin loader logs a failing plugin and goes on",
            wrap=lambda original: _checked(original, ready),
        ),
    )
