"""A bad request is refused where it arrives, with a reason; the scheduler never sees it.

SGLang checks much of this already. What it does not check reaches the scheduler, where a value of the
wrong type or out of range raises and ends the server for every client. Every route (native, OpenAI,
Ollama, Anthropic, the offline Engine) passes the four functions that are wrapped here. `install` adds
what only the HTTP application can do: a status of 4xx where SGLang would send 500, or 200 and then an
error inside a stream.
"""

from __future__ import annotations

import copy
from functools import wraps
from typing import Any, get_type_hints

from sgl_det.patch import Patch

__all__ = ["install", "patches"]

_REQUIRES = "sglang>=0.5.17,<0.5.18"
_MAX_COMPLETIONS = 16384  # prompts times n of one request; a body of 100 bytes can ask for any n
_INT32, _INT64 = 2**31 - 1, 2**63 - 1
_FLOAT32 = 3.4028234663852886e38
# Set by SGLang itself between its processes; a client that sets them only breaks its own request.
_INTERNAL_PARAMS = frozenset(
    {"stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized"}
)
# One value for all prompts of a batch, or a list with one for each prompt.
_PER_PROMPT = (
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_sampling_mask",
    "return_hidden_states",
    "lora_path",
    "lora_id",
    "custom_logit_processor",
    "extra_key",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "decode_tp_size",
)
# These are lists for one prompt too.
_NESTED = ("token_ids_logprob", "image_data", "video_data", "audio_data", "modalities")
# What a malformed value raises in code that did not expect it.
_MALFORMED = (TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)


def _refuse(what: str, found: Any, expected: str) -> None:
    shown = repr(found)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    raise ValueError(f"{what} is {shown}; expected {expected}")


def _malformed(error: Exception) -> ValueError:
    return ValueError(f"the request is malformed: {type(error).__name__}: {str(error)[:200]}")


# --- sampling parameters ---------------------------------------------------------------------------


def _typed(params: Any) -> dict[str, Any]:
    """A copy of one prompt's sampling parameters whose values have the declared types."""
    import msgspec
    import numpy
    from sglang.srt.sampling.sampling_params import SamplingParams

    if not isinstance(params, dict):
        _refuse("sampling_params", params, "an object of named parameters")
    types = get_type_hints(SamplingParams)
    # Upstream drops a null among the ids, and takes null for every parameter's default.
    types["stop_token_ids"] = set[int | None] | None
    checked = {}
    for key, value in params.items():
        if key not in types or key in _INTERNAL_PARAMS:
            raise ValueError(f"sampling_params has no parameter named {str(key)[:80]!r}")
        value = float(value) if isinstance(value, numpy.floating) else value
        if value is not None:
            try:
                msgspec.convert(value, types[key])
            except (msgspec.ValidationError, *_MALFORMED) as error:
                raise ValueError(f"sampling parameter {key} is malformed: {error}") from None
        checked[key] = value
    if checked.get("n", 1) is None:
        del checked["n"]
    return checked


def _deterministic() -> bool:
    from sglang.srt.runtime_context import get_exec

    return get_exec().deterministic.enable_deterministic_inference


def _check_ranges(params: Any, vocab_size: int) -> None:
    """Ranges that the sampler's tensors need and SGLang's own check leaves out."""
    if params.min_p > 0 and _deterministic():
        raise ValueError(
            f"min_p is {params.min_p}, and min_p is not supported in deterministic mode; leave it "
            "out or use top_p"
        )
    if params.top_k > _INT32:
        _refuse("top_k", params.top_k, "-1 or a 32-bit integer above 0")
    if params.n < 1:
        _refuse("n", params.n, "at least 1")
    seed = params.sampling_seed
    if seed is not None and not -_INT64 - 1 <= seed <= _INT64:
        _refuse("sampling_seed", seed, "a 64-bit signed integer")
    for key in ("max_new_tokens", "min_new_tokens"):
        if (getattr(params, key) or 0) > _INT64:
            _refuse(key, getattr(params, key), "a 64-bit integer")
    if params.stream_interval is not None and not 1 <= params.stream_interval <= _INT64:
        _refuse("stream_interval", params.stream_interval, "at least 1")
    for token in params.stop_token_ids or ():
        if not 0 <= token < vocab_size:
            _refuse("a token of stop_token_ids", token, f"an id of the vocabulary of {vocab_size}")
    for token, bias in (params.logit_bias or {}).items():
        # Minus infinity bans a token; plus infinity or a NaN leaves no distribution to sample from.
        if not (abs(bias) <= _FLOAT32 or bias == -float("inf")):
            _refuse(f"logit_bias of token {token}", bias, "a finite 32-bit float")


def _verifying(original):
    @wraps(original)
    def verify(self, vocab_size):
        original(self, vocab_size)
        _check_ranges(self, vocab_size)

    return verify


# --- the shape of a request ------------------------------------------------------------------------


def _check_params(obj: Any) -> None:
    """Types of the sampling parameters, and the number of completions that they ask for."""
    params, prompts = obj.sampling_params, obj.batch_size
    if params is None:
        return
    if isinstance(params, list):
        if obj.is_single or len(params) != prompts:
            expected = "one object" if obj.is_single else f"a list of {prompts}, one for a prompt"
            _refuse("sampling_params", params, expected)
        obj.sampling_params = [_typed(p) for p in params]
    else:
        obj.sampling_params = _typed(params)
    counts = obj.sampling_params if isinstance(params, list) else [obj.sampling_params]
    for n in (p.get("n", 1) for p in counts):
        if not 1 <= n * prompts <= _MAX_COMPLETIONS:
            expected = f"at least 1, and at most {_MAX_COMPLETIONS} completions in a request"
            _refuse("n", n, expected)


def _check_prompt(obj: Any) -> None:
    if obj.text is None and obj.input_ids is None and obj.input_embeds is not None:
        rows = obj.input_embeds
        if not (isinstance(rows, list) and rows and isinstance(rows[0], list) and rows[0]):
            _refuse("input_embeds", rows, "a list of rows of floats, none of them empty")
    for name in ("text", "input_ids"):
        if isinstance(getattr(obj, name), (list, tuple)) and len(getattr(obj, name)) == 0:
            raise ValueError(f"{name} is empty; expected at least one prompt")


def _check_per_prompt(obj: Any) -> None:
    """Lists with an entry for each prompt have as many entries as there are prompts."""
    if obj.is_single:
        for name in (*_PER_PROMPT, "rid"):
            if isinstance(getattr(obj, name), list):
                _refuse(name, getattr(obj, name), "one value, as the request has one prompt")
    else:
        expanded = obj.batch_size * obj.parallel_sample_num
        for name in (*_PER_PROMPT, *_NESTED, "sampling_params"):
            value = getattr(obj, name)
            if isinstance(value, list) and len(value) != expanded:
                _refuse(name, value, f"a list of {obj.batch_size}, one for each prompt")
        delimiters = obj.multi_item_delimiter_indices
        if delimiters is not None and len(delimiters) != obj.batch_size:
            _refuse("multi_item_delimiter_indices", delimiters, "one list for each prompt")
    for rid in obj.rid if isinstance(obj.rid, list) else [obj.rid]:
        # The scheduler aborts by prefix, and an empty one is the prefix of every request.
        if not isinstance(rid, str) or not rid:
            _refuse("rid", rid, "text that is not empty")


def _normalizing(original):
    @wraps(original)
    def normalize_batch_and_arguments(self):
        try:
            self._validate_inputs()
            _check_prompt(self)
            self._determine_batch_size()
            _check_params(self)
            original(self)
            _check_per_prompt(self)
        except _MALFORMED as error:
            raise _malformed(error) from error

    return normalize_batch_and_arguments


# --- what the tokenizer's process knows about a prompt -----------------------------------------------


def _check_one(manager: Any, obj: Any, input_ids: list[int] | None) -> None:
    """Tokens, logprobs and features of one prompt against the model and the server's settings."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    if not isinstance(obj, GenerateReqInput):
        return
    config, args = manager.model_config, manager.server_args
    vocab = config.vocab_size
    for kind in ("image", "video", "audio"):
        if getattr(obj, f"{kind}_data") and manager.mm_processor is None:
            raise ValueError(f"{kind}_data is given, but the model reads text only; leave it out")
    if obj.lora_id and not args.enable_lora:
        raise ValueError("lora_id is given, but the server is started without LoRA; leave it out")
    if obj.http_worker_ipc is not None and manager.tokenizer_ipc_name is None:
        raise ValueError("http_worker_ipc is set between SGLang's own processes; leave it out")
    for row in obj.input_embeds or ():
        if len(row) != config.hidden_size:
            _refuse("the width of input_embeds", len(row), f"the hidden size {config.hidden_size}")
    if obj.input_embeds is None and not input_ids and not obj.contains_mm_input():
        raise ValueError("the prompt is empty; expected at least one token")
    if input_ids and not 0 <= min(input_ids) <= max(input_ids) < vocab:
        worst = min(input_ids) if min(input_ids) < 0 else max(input_ids)
        _refuse("a token of input_ids", worst, f"an id of the vocabulary, in [0, {vocab})")
    if not 0 <= (obj.top_logprobs_num or 0) <= vocab:
        _refuse("top_logprobs_num", obj.top_logprobs_num, f"an integer in [0, {vocab}]")
    start, tokens = obj.logprob_start_len, len(obj.input_embeds or input_ids or ())
    if start is not None and not -1 <= start <= tokens:
        _refuse("logprob_start_len", start, f"-1 or at most the prompt's {tokens} tokens")
    for index in obj.multi_item_delimiter_indices or ():
        if not 0 <= index < tokens:
            _refuse("multi_item_delimiter_indices", index, f"indices below {tokens}")


def _validating(original):
    @wraps(original)
    def _validate_one_request(self, obj, input_ids):
        original(self, obj, input_ids)
        _check_one(self, obj, input_ids)

    return _validate_one_request


def _check_wire(tokenized: Any) -> None:
    """Encode and decode the message as the scheduler will, without its large or pickled parts."""
    import msgspec
    from sglang.srt.managers import io_struct

    small = copy.copy(tokenized)
    for name in ("input_ids", "mm_inputs", "time_stats"):
        setattr(small, name, None)
    try:
        io_struct.msgpack_decode(io_struct.msgpack_encode(small))
    except (msgspec.MsgspecError, *_MALFORMED) as error:
        # The message is an array: find the field that the decoder's path counts.
        raise ValueError(f"{_field(error, type(tokenized))}: {error}") from error


def _field(error: Exception, kind: type) -> str:
    import re

    import msgspec

    place = re.search(r"\$\[(\d+)\]", str(error))
    names = [f.name for f in msgspec.structs.fields(kind)]
    index = int(place[1]) - 1 if place else -1  # the first entry is the tag of the type
    return f"{names[index]} has a wrong type" if 0 <= index < len(names) else "a wrong type"


def _creating(original):
    @wraps(original)
    def _create_tokenized_object(self, obj, *args, **kwargs):
        import re

        try:
            tokenized = original(self, obj, *args, **kwargs)
        except (re.error, *_MALFORMED) as error:
            name = "stop_regex" if isinstance(error, re.error) else "the request"
            raise ValueError(f"{name} is malformed: {str(error)[:200]}") from error
        _check_wire(tokenized)
        return tokenized

    return _create_tokenized_object
