"""What the launcher's process checks before it lets the server answer, and how it ends."""

from __future__ import annotations

import os
from functools import wraps
from typing import Any, Protocol

from sgl_det.patch import Patch, PatchError
from sgl_det.patches.table import patches_of

_REAP_S = 30.0


class Hook(Protocol):
    """The part of ``sgl_det.launch_hook`` that these patches call.

    ready       with the first worker's report; what it raises stops the server
    terminate   when SIGTERM came
    end         ends the process, whose children have ended
    """

    def ready(self, report: dict[str, Any]) -> None: ...

    def terminate(self) -> None: ...

    def end(self) -> None: ...


def _checking(hook):
    return lambda original: _checked(original, hook)


def _checked(original, hook):
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
        hook.ready(infos[0]["sgl_det"])
        return infos

    return _wait_for_scheduler_ready


def _terminating(hook):
    def wrap(original):
        @wraps(original)
        def sigterm_handler(self, signum=None, frame=None):
            original(self, signum, frame)
            hook.terminate()

        return sigterm_handler

    return wrap


def _ending(hook):
    def wrap(original):
        @wraps(original)
        def kill_process_tree(parent_pid, include_parent=True, skip_pid=None, wait_timeout=None):
            if not include_parent or parent_pid != os.getpid():
                return original(parent_pid, include_parent, skip_pid, wait_timeout)
            try:
                original(parent_pid, False, skip_pid, wait_timeout or _REAP_S)
            finally:
                hook.end()

        return kill_process_tree

    return wrap


def patches(hook: Hook | None) -> tuple[Patch, ...]:
    """The patches of the process that starts the workers, besides those for requests."""
    rows = (
        (
            "worker_report",
            "sglang.srt.entrypoints.engine:_wait_for_scheduler_ready",
            "baadf5b2923f",
            "no server or engine is ready before each worker has shown that its patches hold",
            _checking(hook),
            "none: SGLang's plugin loader logs a failing plugin and goes on",
        ),
        (
            "end",
            "sglang.srt.utils.common:kill_process_tree",
            "f37ab0d5b2fc",
            "the process that was asked to end has status 0, any other 1 and a reason in the log",
            _ending(hook),
            "none: SGLang ends itself with SIGKILL, which looks like lack of memory",
        ),
        (
            "drain",
            "sglang.srt.managers.tokenizer_manager:SignalHandler.sigterm_handler",
            "df29b8a8c586",
            "a client that stops reading cannot hold up the end for ever",
            _terminating(hook),
            "none: SGLang waits for the last request without a limit",
        ),
    )
    return patches_of("launcher", rows)
