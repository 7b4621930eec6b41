"""What the scheduler process tells about itself: its start, its end, and its weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, Protocol

from sgl_det.patch import Patch
from sgl_det.patches.table import Row, patches_of

_UPSTREAM = "none: SGLang's plugins can neither report at start-up nor follow the weights"
_SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"


class Observer(Protocol):
    """The part of ``sgl_det.worker`` that these patches call."""

    def describe(self, scheduler: Any) -> dict[str, Any]: ...

    def weights_changed(self) -> None: ...

    def idle(self, scheduler: Any) -> None: ...

    def failures(self) -> AbstractContextManager[None]: ...


def patches(observer: Observer | None) -> tuple[Patch, ...]:
    """The patches of every scheduler process, reporting to ``observer``."""
    rows = (
        (
            "report_at_start",
            f"{_SCHEDULER}.get_init_info",
            "fec3326bf012",
            "the launcher sees what holds in the worker, after graph capture, before serving",
            _init_info(observer),
        ),
        (
            "report_on_request",
            f"{_SCHEDULER}.get_internal_state",
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
    return patches_of("worker", (*rows, *_life(observer)), _UPSTREAM)


def _life(observer: Observer | None) -> tuple[Row, ...]:
    """Rows on what happens while the process starts, idles and ends."""
    return (
        (
            "idle",
            f"{_SCHEDULER}.maybe_sleep_on_idle",
            "02d6a64295e8",
            "one case of the proof is repeated every few minutes in the idle server",
            _idle(observer),
            "none: SGLang's plugins have no idle hook",
        ),
        (
            "start_fails",
            f"{_SCHEDULER}.__init__",
            "f3d001c76cfc",
            "a proof or a cache that fails in the worker is told by the launcher, in a sentence",
            _failing(observer),
            "none: SGLang's launcher knows only that a worker failed",
        ),
        (
            "loop_fails",
            f"{_SCHEDULER}.run_event_loop",
            "191bfe659451",
            "so is what ends a worker while it serves",
            _failing(observer),
            "none: SGLang's launcher knows only that a worker failed",
        ),
    )


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


def _idle(observer):
    def wrap(original):
        @wraps(original)
        def maybe_sleep_on_idle(self):
            observer.idle(self)
            return original(self)

        return maybe_sleep_on_idle

    return wrap


def _failing(observer):
    def wrap(original):
        @wraps(original)
        def call(self, *args, **kwargs):
            with observer.failures():
                return original(self, *args, **kwargs)

        return call

    return wrap
