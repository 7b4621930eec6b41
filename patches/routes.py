"""Routes that check less than the native one, or leave the check to a scheduler that dies of it."""

from __future__ import annotations

from functools import wraps
from typing import Any

from sgl_det.patch import Patch
from sgl_det.patches.table import patches_of


def _ollama_options(original):
    @wraps(original)
    def _convert_options_to_sampling_params(self, options=None):
        params = original(self, options)
        if "seed" in params:
            params["sampling_seed"] = params.pop("seed")
        return params

    return _convert_options_to_sampling_params


def _ollama_chat(original):
    @wraps(original)
    async def handle_chat(self, request, raw_request):
        if not request.messages:
            raise ValueError("messages is empty; expected at least one message")
        return await original(self, request, raw_request)

    return handle_chat


def _detokenizing(original):
    @wraps(original)
    async def _handle_non_streaming_request(self, adapted_request, request, raw_request):
        vocab = self.tokenizer_manager.model_config.vocab_size
        for entry in request.tokens if isinstance(request.tokens, list) else ():
            for token in entry if isinstance(entry, list) else [entry]:
                if isinstance(token, int) and not 0 <= token < vocab:
                    return self.create_error_response(
                        f"tokens contains {token}; expected ids of the vocabulary, in [0, {vocab})"
                    )
        return await original(self, adapted_request, request, raw_request)

    return _handle_non_streaming_request


def _tags(obj: Any) -> set[str]:
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

    tags, known = set(obj.tags or GPU_MEMORY_ALL_TYPES), set(GPU_MEMORY_ALL_TYPES)
    if tags - known:
        raise ValueError(f"tags {sorted(tags - known)} are unknown; expected {sorted(known)}")
    return tags


def _releasing(original):
    @wraps(original)
    async def release_memory_occupation(self, obj, request=None):
        released = self.__dict__.setdefault("_sgl_det_released", set())
        tags = _tags(obj)
        if self.rid_to_state:
            raise ValueError("memory is released only while no request runs; wait or abort them")
        result = await original(self, obj, request)
        released |= tags
        return result

    return release_memory_occupation


def _resuming(original):
    @wraps(original)
    async def resume_memory_occupation(self, obj, request=None):
        released = self.__dict__.setdefault("_sgl_det_released", set())
        tags = _tags(obj)
        if tags - released:
            raise ValueError(f"memory of {sorted(tags - released)} was not released")
        result = await original(self, obj, request)
        released -= tags
        return result

    return resume_memory_occupation


def patches() -> tuple[Patch, ...]:
    """The patches of the process that serves HTTP."""
    ollama = "sglang.srt.entrypoints.ollama.serving:OllamaServing"
    control = "sglang.srt.managers.tokenizer_control_mixin:TokenizerControlMixin"
    detokenize = "sglang.srt.entrypoints.openai.serving_tokenize:OpenAIServingDetokenize"
    rows = (
        (
            "ollama_seed",
            f"{ollama}._convert_options_to_sampling_params",
            "877f96a5d5e7",
            "Ollama's seed is SGLang's sampling_seed",
            _ollama_options,
        ),
        (
            "ollama_chat",
            f"{ollama}.handle_chat",
            "1be7bbf7b260",
            "a chat without messages is refused with a reason",
            _ollama_chat,
        ),
        (
            "detokenize",
            f"{detokenize}._handle_non_streaming_request",
            "a48213df9886",
            "tokens outside the vocabulary are refused with a reason",
            _detokenizing,
        ),
        (
            "release",
            f"{control}.release_memory_occupation",
            "7cca5b467ee6",
            "unknown tags, and a release while requests run, are refused with a reason",
            _releasing,
        ),
        (
            "resume",
            f"{control}.resume_memory_occupation",
            "defcddb4ea53",
            "memory that was not released is not resumed",
            _resuming,
        ),
    )
    return patches_of("routes", rows, "none: SGLang answers 500, or its scheduler ends")
