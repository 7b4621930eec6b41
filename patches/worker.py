"""What the scheduler process tells about itself, and when its weights change."""

from __future__ import annotations

from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol

from sgl_det.patch import Patch

_REQUIRES = "sglang>=0.5.17,<0.5.18"
_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"


class Observer(Protocol):
    """The part of ``sgl_det.worker`` that these patches call."""

    def describe(self, scheduler: Any) -> dict[str, Any]: ...

    def weights_changed(self) -> None: ...


def patches(observer: Observer) -> tuple[Patch, ...]:
    """The patches of every scheduler process, reporting to ``observer``."""

    def init_info(original):
        @wraps(original)
        def get_init_info(self):
            return {**original(self), "sgl_det": observer.describe(self)}

        return get_init_info

    def internal_state(original):
        @wraps(original)
        def get_internal_state(self, recv_req):
            output = original(self, recv_req)
            output.internal_state["sgl_det"] = observer.describe(self)
            return output

        return get_internal_state

    def updating(original):
        @wraps(original)
        @contextmanager
        def _observe_weight_load(self, source):
            try:
                with original(self, source):
                    yield
            finally:
                observer.weights_changed()

        return _observe_weight_load

    def touching(original):
        @wraps(original)
        def call(self, recv_req):
            try:
                return original(self, recv_req)
            finally:
                observer.weights_changed()

        return call

    return (
        Patch(
            name="worker.report_at_start",
            target="sglang.srt.managers.scheduler:Scheduler.get_init_info",
            requires=_REQUIRES,
            fingerprints=("fec3326bf012",),
            why="the launcher sees what holds in the worker, after graph capture, before serving",
            upstream="none: there is no hook for a plugin's report in the start-up handshake",
            wrap=init_info,
        ),
        Patch(
            name="worker.report_on_request",
            target="sglang.srt.managers.scheduler:Scheduler.get_internal_state",
            requires=_REQUIRES,
            fingerprints=("189b658bbc38",),
            why="GET /determinism is answered by the process that computes, not by the launcher",
            upstream="none: there is no hook for a plugin's report in the internal state",
            wrap=internal_state,
        ),
        Patch(
            name="worker.weights_updated",
            target=f"{_WEIGHTS}._observe_weight_load",
            requires=_REQUIRES,
            fingerprints=("ca0288c1cf3b",),
            why="every update from disk, tensor, broadcast or IPC renews the digest of the weights",
            upstream="none: there is no hook after a weight update",
            wrap=updating,
        ),
        Patch(
            name="worker.weights_resumed",
            target=f"{_WEIGHTS}.resume_memory_occupation",
            requires=_REQUIRES,
            fingerprints=("78cc79ad9347",),
            why="weights that were released and restored are hashed again",
            upstream="none: there is no hook after a weight update",
            wrap=touching,
        ),
        Patch(
            name="worker.weights_checked",
            target=f"{_WEIGHTS}.check_weights",
            requires=_REQUIRES,
            fingerprints=("9e9ddb83fbe3",),
            why="SGLang's weight checker can overwrite the weights",
            upstream="none: there is no hook after a weight update",
            wrap=touching,
        ),
    )
