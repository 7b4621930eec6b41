"""Every request has a seed of its own, taken on every route, and its answer tells which.

SGLang gives 42 to all that name none, the same seed to all samples of one request, and no place for
a seed on the routes of Responses, Anthropic and Ollama. Here each route takes ``seed`` or
``sampling_seed`` at the top of the body. The rules are in `seed_rules`.
"""

from __future__ import annotations

import copy
from contextlib import aclosing
from functools import wraps
from typing import Any

from sgl_det.patch import Patch
from sgl_det.patches import seed_rules as rules
from sgl_det.patches.table import patches_of

ASKED = "_sgl_det_asked"  # on a request of SGLang's: the seed at the top of the body
TOLD = "sgl_det_seeds"  # in the scope of an HTTP request: the seeds of its answers, in their order
_SAMPLES = "_sgl_det_samples"  # on the state of a request with n > 1: how many were sent


def _of_body(request: Any) -> int | None:
    body = getattr(request, "_json", None)  # kept there by Starlette, which has parsed it
    if not isinstance(body, dict):
        return None
    return rules.one_of((name, body.get(name)) for name in rules.NAMES)


def _asking(original):
    @wraps(original)
    async def generate_request(self, obj, request=None):
        setattr(obj, ASKED, _of_body(request))
        async with aclosing(original(self, obj, request)) as answers:
            async for answer in answers:
                yield answer

    return generate_request


def _responding(original):
    @wraps(original)
    async def create_responses(self, request, raw_request=None):
        # A stream is open before its request is read; an answer in the background tells no seed.
        if _of_body(raw_request) is None and request.background:
            raise ValueError(
                "seed is missing; a response in the background cannot tell a fresh one"
            )
        return await original(self, request, raw_request)

    return create_responses


def settle(obj: Any, tokenized: Any) -> None:
    """Give a request that names no seed one, in its message and in its own parameters."""
    from msgspec.structs import asdict

    params = tokenized.sampling_params
    if params.sampling_seed is None:
        prompt = tokenized.input_embeds or [*(tokenized.input_ids or ())]
        params.sampling_seed = rules.made_up(prompt, asdict(params))
    # Prompts of a batch share the object in which their parameters came.
    obj.sampling_params = {**obj.sampling_params, "sampling_seed": params.sampling_seed}


def _sampling(original):
    @wraps(original)
    def _init_child_req_state(self, logical_rid, obj, request=None):
        parent = self.rid_to_state.get(logical_rid)
        original(self, logical_rid, obj, request)
        # SGLang sends the prompt alone first, for the cache, and then n samples.
        sample = getattr(parent, _SAMPLES, -1)
        setattr(parent, _SAMPLES, sample + 1)
        obj.__dict__[_SAMPLES] = sample
        if sample >= 0:
            seed = rules.of_sample(obj.sampling_params["sampling_seed"], sample)
            obj.sampling_params = {**obj.sampling_params, "sampling_seed": seed}

    return _init_child_req_state


def _sending(original):
    @wraps(original)
    def _send_one_request(self, tokenized_obj):
        state = self.rid_to_state.get(tokenized_obj.rid)
        seed = _seed(state.obj) if state is not None else None
        if seed is not None and tokenized_obj.sampling_params.sampling_seed != seed:
            # Samples of one request share these.
            tokenized_obj.sampling_params = copy.copy(tokenized_obj.sampling_params)
            tokenized_obj.sampling_params.sampling_seed = seed
        return original(self, tokenized_obj)

    return _send_one_request


def _seed(obj: Any) -> int | None:
    params = obj.sampling_params
    return params.get("sampling_seed") if isinstance(params, dict) else None


def _telling(original):
    async def told(answers, seed):
        async with aclosing(answers):
            async for answer in answers:
                answer["meta_info"]["sampling_seed"] = seed
                yield answer

    @wraps(original)
    def _wait_one_response(self, obj, request=None):
        answers, seed = original(self, obj, request), _seed(obj)
        if seed is None:
            return answers
        if request is not None and obj.__dict__.get(_SAMPLES) != -1:
            request.scope.setdefault(TOLD, []).append(seed)
        return told(answers, seed)

    return _wait_one_response


_MANAGER = "sglang.srt.managers.tokenizer_manager:TokenizerManager"
_TABLE = (
    (
        "ask",
        f"{_MANAGER}.generate_request",
        "198a09f1bde9",
        "each route takes a seed, those that SGLang gives none among them",
        _asking,
    ),
    (
        "responses",
        "sglang.srt.entrypoints.openai.serving_responses:OpenAIServingResponses.create_responses",
        "6924c9697e94",
        "a bad seed is refused before a stream is open",
        _responding,
    ),
    (
        "sample",
        f"{_MANAGER}._init_child_req_state",
        "6d2dab58f3c5",
        "sample i of n has a seed that follows from the request's and i",
        _sampling,
    ),
    (
        "send",
        f"{_MANAGER}._send_one_request",
        "bedb9e234678",
        "the scheduler gets a sample's own seed",
        _sending,
    ),
    (
        "tell",
        f"{_MANAGER}._wait_one_response",
        "8c86a4c76871",
        "an answer tells the seed that repeats it",
        _telling,
    ),
)


def patches() -> tuple[Patch, ...]:
    """The patches of the process that takes requests: an HTTP server, or an Engine."""
    return patches_of("seeds", _TABLE, "https://github.com/sgl-project/sglang/pull/28805")
