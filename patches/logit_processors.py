"""Code that a request brings along edits that request's logits, and no neighbour's.

SGLang calls it once for all rows that brought the same code, with whatever it keeps from call to
call; one that asks for something else than its neighbour ends the server, as any error of it does.
Here each request has an object of its own, which is called once a token, with one row, when all
tokens before it are known. An error ends the request.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from sgl_det.patch import Patch
from sgl_det.patches.table import patches_of

_OWN = "_sgl_det_logit_processor"  # on a request of the scheduler's


def settle(tokenized: Any) -> None:
    """The scheduler tells a processor whose request it is in these parameters, if there are any."""
    params = tokenized.sampling_params
    if tokenized.custom_logit_processor and params.custom_params is None:
        params.custom_params = {}


class _Unusable:
    """Stands for code that cannot be loaded."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __call__(self, logits: Any, parameters: Any) -> Any:
        raise self._error


def _loading(original):
    @wraps(original)
    def _cache_from_str(json_str):
        def make():
            try:
                return original(json_str)()
            except Exception as error:
                return _Unusable(error)

        return make

    return _cache_from_str


def _own(req: Any) -> Any:
    found = getattr(req, _OWN, None)
    if found is None:
        from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

        found = CustomLogitProcessor.from_str(req.custom_logit_processor)
        setattr(req, _OWN, found)
    return found


def _edited(row: Any, req: Any, parameters: dict[str, Any]) -> Any:
    """The row [1, V] after the request's code. Raises whatever that raises."""
    found = _own(req)(row.clone(), [parameters])
    if getattr(found, "shape", None) != row.shape:
        raise ValueError(f"it returned {_shown(found)}; expected logits {list(row.shape)}")
    return found


def _shown(found: Any) -> str:
    shape = getattr(found, "shape", None)
    return type(found).__name__ if shape is None else f"a tensor {list(shape)}"


def _end(req: Any, error: Exception) -> None:
    from http import HTTPStatus

    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    reason = f"custom_logit_processor failed: {type(error).__name__}: {str(error)[:200]}"
    req.to_finish = FINISH_ABORT(reason, HTTPStatus.BAD_REQUEST, "BadRequestError")


def _row_by_row(original):
    @wraps(original)
    def apply_custom_logit_processor(logits, sampling_batch_info, num_tokens_in_batch=1):
        if num_tokens_in_batch != 1:
            raise ValueError(f"{num_tokens_in_batch} tokens of a request at once; expected one")
        for _, mask in sampling_batch_info.custom_logit_processor.values():
            for row in mask.nonzero().view(-1).tolist():
                parameters = sampling_batch_info.custom_params[row]
                req = parameters["__req__"]
                if req.inflight_middle_chunks > 0 or req.to_finish:
                    continue  # nothing is sampled here yet, or any more
                place = slice(row, row + 1)
                try:
                    logits[place] = _edited(logits[place], req, parameters)
                except Exception as error:
                    _end(req, error)

    return apply_custom_logit_processor


_TABLE = (
    (
        "load",
        "sglang.srt.sampling.custom_logit_processor:_cache_from_str",
        "051072eaef32",
        "code that cannot be loaded ends its request, not the server",
        _loading,
    ),
    (
        "row",
        "sglang.srt.layers.sampler:apply_custom_logit_processor",
        "a38967148fd4",
        "a request's code sees its own row alone, and an error of it ends its request alone",
        _row_by_row,
    ),
)


def patches() -> tuple[Patch, ...]:
    """The patches of every scheduler process."""
    return patches_of("logit_processors", _TABLE, "none: SGLang calls it for a batch")
