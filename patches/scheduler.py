"""What would end the scheduler, and with it the server for every client.

SGLang's scheduler dies of an exception in whatever message it handles: a weight update from a bad
file, or two requests in one batch of which only one asks for the logprobs of given tokens.
"""

from __future__ import annotations

import logging
from functools import wraps
from typing import Any

from sgl_det.patch import Patch
from sgl_det.patches.table import patches_of

_FATAL = "none: an exception in a message handler is fatal in SGLang"
_logger = logging.getLogger(__name__)


def _answer(message: Any, error: Exception) -> Any:
    """The answer that tells of a failure, or None if this kind of message has none."""
    from msgspec.structs import fields
    from sglang.srt.managers import io_struct

    name = type(message).__name__
    if not name.endswith("ReqInput"):
        return None
    kind = getattr(io_struct, f"{name.removesuffix('Input')}Output", None)
    known = {f.name for f in fields(kind)} if kind is not None else set()
    if {"success", "message"} <= known:
        return kind(success=False, message=f"{type(error).__name__}: {error}")
    return kind(parameter=None) if "parameter" in known else None


def _guarding(original):
    @wraps(original)
    def __call__(self, obj):
        try:
            return original(self, obj)
        except Exception as error:
            answer = _answer(obj, error)
            if answer is None:
                raise
            _logger.exception("sgl_det: %s failed", type(obj).__name__)
            return answer

    return __call__


def _generating(original):
    @wraps(original)
    def handle_generate_request(self, recv_req):
        from sglang.srt.managers.io_struct import AbortReq

        try:
            original(self, recv_req)
        except Exception as error:
            _logger.exception("sgl_det: request %s cannot be scheduled", recv_req.rid)
            reason = f"the request cannot be scheduled: {type(error).__name__}: {error}"
            finish = {"type": "abort", "status_code": 400, "message": reason}
            answer = AbortReq(rid=recv_req.rid, finished_reason=finish)
            self.ipc_channels.send_to_tokenizer.send_output(answer, recv_req)

    return handle_generate_request


def _filling(original):
    @wraps(original)
    def get_token_ids_logprobs_raw(logprobs, *args, no_copy_to_cpu=False, **kwargs):
        values, ids = original(logprobs, *args, no_copy_to_cpu=no_copy_to_cpu, **kwargs)
        if no_copy_to_cpu:
            # The caller converts every entry from a tensor, and upstream leaves a list in some.
            values = [logprobs.new_empty(0) if isinstance(v, list) else v for v in values]
        return values, ids

    return get_token_ids_logprobs_raw


def patches() -> tuple[Patch, ...]:
    """The patches of a scheduler process."""
    rows = (
        (
            "answer",
            "sglang.utils:TypeBasedDispatcher.__call__",
            "46eb1d2c22be",
            "a control request that fails is answered, instead of ending the server",
            _guarding,
        ),
        (
            "queue",
            "sglang.srt.managers.scheduler:Scheduler.handle_generate_request",
            "37161ac19f16",
            "a request that cannot be queued is refused, instead of ending the server",
            _generating,
        ),
        (
            "token_ids_logprob",
            "sglang.srt.layers.logprob_processor:get_token_ids_logprobs_raw",
            "9c99e56b1a9a",
            "a request without token_ids_logprob may share a batch with one that has them",
            _filling,
        ),
    )
    return patches_of("scheduler", rows, _FATAL)
