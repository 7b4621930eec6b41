"""What the scheduler process tells about itself, and when its weights change."""

from __future__ import annotations

from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol

from sgl_det.patch import Patch
from sgl_det.patches.table import patches_of

_UPSTREAM = "none: SGLang's plugins can neither report at start-up nor follow the weights"
_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"


class Observer(Protocol):
    """The part of ``sgl_det.worker`` that these patches call."""

    def describe(self, scheduler: Any) -> dict[str, Any]: ...

    def weights_changed(self) -> None: ...


def patches(observer: Observer | None) -> tuple[Patch, ...]:
    """The patches of every scheduler process, reporting to ``observer``."""
    scheduler = "sglang.srt.managers.scheduler:Scheduler"
    rows = (
        (
            "report_at_start",
            f"{scheduler}.get_init_info",
            "fec3326bf012",
            "the launcher sees what holds in the worker, after graph capture, before serving",
            _init_info(observer),
        ),
        (
            "report_on_request",
            f"{scheduler}.get_internal_state",
            "189b658bbc38",
            "GET /determinism is answered by the process that computes, not by the launcher",
            _internal_state(observer),
        ),
        (
            "weights_updated",
            f"{_WEIGHTS}._observe_weight_load",
            "ca0288c1cf3b",
            "every update from disk, tensor, broadcast or IPC renews the digest of the weights",
            _updating(observer),
        ),
        (
            "weights_resumed",
            f"{_WEIGHTS}.resume_memory_occupation",
            "78cc79ad9347",
            "weights that were released and restored are hashed again",
            _touching(observer),
        ),
        (
            "weights_checked",
            f"{_WEIGHTS}.check_weights",
            "9e9ddb83fbe3",
            "SGLang's weight checker can overwrite the weights",
            _touching(observer),
        ),
    )
    return patches_of("worker", rows, _UPSTREAM)


def _init_info(observer):
    def wrap(original):
        @wraps(original)
        def get_init_info(self):
            return {**original(self), "sgl_det": observer.describe(self)}

        return get_init_info

    return wrap


def _internal_state(observer):
    def wrap(original):
        @wraps(original)
        def get_internal_state(self, recv_req):
            output = original(self, recv_req)
            output.internal_state["sgl_det"] = observer.describe(self)
            return output

        return get_internal_state

    return wrap


def _updating(observer):
    def wrap(original):
        @wraps(original)
        @contextmanager
        def _observe_weight_load(self, source):
            try:
                with original(self, source):
                    yield
            finally:
                observer.weights_changed()

        return _observe_weight_load

    return wrap


def _touching(observer):
    def wrap(original):
        @wraps(original)
        def call(self, recv_req):
            try:
                return original(self, recv_req)
            finally:
                observer.weights_changed()

        return call

    return wrap
