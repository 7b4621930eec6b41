"""What a request must satisfy before it is sent to the scheduler. Each check raises ValueError.

SGLang turns a ValueError into an answer of status 400 with its text as the reason.
"""

from __future__ import annotations

import copy
import re
from functools import cache
from typing import Any, get_type_hints

from sgl_det.patches import seed_rules
from sgl_det.patches.seeds import ASKED

_MAX_COMPLETIONS = 16384  # prompts times n of one request; a body of 100 bytes can ask for any n
_MAX_DEPTH = 200
_INT32, _INT64 = 2**31 - 1, 2**63 - 1
_FLOAT32, _MAX_BIAS, _MIN_SCALE = 3.4028234663852886e38, 1e30, 1e-6
_ANY_JSON = "$$ANY$$"  # SGLang's name for the grammar of all JSON
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
MALFORMED = (TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)


def _refuse(what: str, found: Any, expected: str) -> None:
    shown = repr(found)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    raise ValueError(f"{what} is {shown}; expected {expected}")


def malformed(error: Exception) -> ValueError:
    return ValueError(f"the request is malformed: {type(error).__name__}: {str(error)[:200]}")


@cache
def _types() -> dict[str, Any]:
    """Name of each sampling parameter that a client may give -> its declared type."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    types = {k: v for k, v in get_type_hints(SamplingParams).items() if k not in _INTERNAL_PARAMS}
    # Upstream drops a null among these ids.
    types["stop_token_ids"] = set[int | None] | None
    return types


def _typed(params: Any) -> dict[str, Any]:
    """A copy of one prompt's sampling parameters whose values have the declared types."""
    import msgspec
    import numpy

    if not isinstance(params, dict):
        _refuse("sampling_params", params, "an object of named parameters")
    types, checked = _types(), {}
    seed = seed_rules.one_of((name, params.get(name)) for name in seed_rules.NAMES)
    params = {k: v for k, v in params.items() if k not in seed_rules.NAMES}
    if seed is not None:
        params["sampling_seed"] = seed
    for key, value in params.items():
        if key not in types:
            raise ValueError(f"sampling_params has no parameter named {str(key)[:80]!r}")
        value = float(value) if isinstance(value, numpy.floating) else value
        if types[key] in (int, int | None) and isinstance(value, float) and value.is_integer():
            value = int(value) if abs(value) < 2**53 else value  # 16.0, as some clients write it
        if value is not None:  # null stands for the default
            try:
                msgspec.convert(value, types[key])
            except (msgspec.ValidationError, *MALFORMED) as error:
                raise ValueError(f"sampling parameter {key} is malformed: {error}") from None
        checked[key] = value
    for token in checked.get("logit_bias") or ():
        if not re.fullmatch(r"-?[0-9]+", token):
            _refuse("a token of logit_bias", token, "the id of a token, in digits")
    if checked.get("n", 1) is None:
        del checked["n"]
    return checked


def _check_json(name: str, text: str) -> None:
    """Text that is no JSON, or so deep that its grammar takes minutes to compile."""
    import json

    try:
        level = [json.loads(text)]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON that can be read: {error}") from None
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for node in level
            if isinstance(node, (dict, list))
            for child in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return
    raise ValueError(f"{name} is nested deeper than {_MAX_DEPTH} levels; expected fewer")


def check_ranges(params: Any, vocab_size: int) -> None:
    """Ranges that the sampler's tensors need and SGLang's own check leaves out."""
    if params.top_k > _INT32:
        _refuse("top_k", params.top_k, "-1 or a 32-bit integer above 0")
    if params.temperature > _FLOAT32:
        _refuse("temperature", params.temperature, "a finite 32-bit float")
    if params.repetition_penalty < _MIN_SCALE:
        _refuse("repetition_penalty", params.repetition_penalty, f"at least {_MIN_SCALE:g}")
    if params.n < 1:
        _refuse("n", params.n, "at least 1")
    seed_rules.checked("sampling_seed", params.sampling_seed)
    for key in ("max_new_tokens", "min_new_tokens"):
        if (getattr(params, key) or 0) > _INT64:
            _refuse(key, getattr(params, key), "a 64-bit integer")
    if params.stream_interval is not None and not 1 <= params.stream_interval <= _INT64:
        _refuse("stream_interval", params.stream_interval, "at least 1")
    if params.json_schema not in (None, _ANY_JSON):
        _check_json("json_schema", params.json_schema)
    for token in params.stop_token_ids or ():
        if not 0 <= token < vocab_size:
            _refuse("a token of stop_token_ids", token, f"an id of the vocabulary of {vocab_size}")
    for token, bias in (params.logit_bias or {}).items():
        # Minus infinity bans a token. Divided by the temperature, a bias must not reach infinity.
        if not (-_FLOAT32 <= bias <= _MAX_BIAS or bias == -float("inf")):
            _refuse(f"logit_bias of token {token}", bias, f"at most {_MAX_BIAS:g}")


def _seeded(params: dict[str, Any], asked: int | None) -> dict[str, Any]:
    """Parameters with the seed at the top of the body, which must not be another than theirs."""
    given = (("seed", asked), ("sampling_seed", params.get("sampling_seed")))
    seed = seed_rules.one_of(given)
    return params if seed is None else {**params, "sampling_seed": seed}


def check_params(obj: Any) -> None:
    """Types of the sampling parameters, and the number of completions that they ask for."""
    params, prompts = obj.sampling_params, obj.batch_size
    seed = obj.__dict__.get(ASKED)
    if params is None:
        obj.sampling_params = None if seed is None else {"sampling_seed": seed}
        return
    if isinstance(params, list):
        if obj.is_single or len(params) != prompts:
            expected = "one object" if obj.is_single else f"a list of {prompts}, one for a prompt"
            _refuse("sampling_params", params, expected)
        obj.sampling_params = [_seeded(_typed(p), seed) for p in params]
    else:
        obj.sampling_params = _seeded(_typed(params), seed)
    counts = obj.sampling_params if isinstance(params, list) else [obj.sampling_params]
    for n in (p.get("n", 1) for p in counts):
        if not 1 <= n * prompts <= _MAX_COMPLETIONS:
            expected = f"at least 1, and at most {_MAX_COMPLETIONS} completions in a request"
            _refuse("n", n, expected)


def check_prompt(obj: Any) -> None:
    """That there is a prompt, of a shape that can be counted."""
    if hasattr(obj.input_ids, "keys"):
        # What chat templates return since transformers 5; Ollama's route passes it on as it is.
        obj.input_ids = obj.input_ids["input_ids"]
    if obj.text is None and obj.input_ids is None and obj.input_embeds is not None:
        rows = obj.input_embeds
        if not (isinstance(rows, list) and rows and isinstance(rows[0], list) and rows[0]):
            _refuse("input_embeds", rows, "a list of rows of floats, none of them empty")
    for name in ("text", "input_ids"):
        if isinstance(getattr(obj, name), (list, tuple)) and len(getattr(obj, name)) == 0:
            raise ValueError(f"{name} is empty; expected at least one prompt")


def check_per_prompt(obj: Any) -> None:
    """Lists with an entry for each prompt have as many entries as there are prompts."""
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

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
        # The scheduler drops these when it is busy. SGLang's own are not logged.
        if rid.startswith(HEALTH_CHECK_RID_PREFIX) and obj.log_metrics:
            _refuse("rid", rid, f"text that does not begin with {HEALTH_CHECK_RID_PREFIX}")


def _check_session(session: dict[str, Any] | None) -> None:
    import msgspec
    from sglang.srt.managers.io_struct import SessionParams

    known = {f.name for f in msgspec.structs.fields(SessionParams)}
    for key in (session or {}).keys() - known:
        raise ValueError(f"session_params has no field named {str(key)[:80]!r}")


def check_one(manager: Any, obj: Any, input_ids: list[int] | None) -> None:
    """Tokens, logprobs and features of one prompt against the model and the server's settings."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    if not isinstance(obj, GenerateReqInput):
        return
    _check_session(obj.session_params)
    config, args = manager.model_config, manager.server_args
    vocab = config.vocab_size
    for kind in ("image", "video", "audio"):
        if getattr(obj, f"{kind}_data") and manager.mm_processor is None:
            raise ValueError(f"{kind}_data is given, but the model reads text only; leave it out")
    if obj.lora_id and not args.enable_lora:
        raise ValueError("lora_id is given, but the server is started without LoRA; leave it out")
    if obj.return_sampling_mask:
        raise ValueError("return_sampling_mask is not supported by the sampler; leave it out")
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
    # A session puts earlier turns before the prompt; the scheduler checks their sum.
    if start is not None and not (-1 <= start and (start <= tokens or obj.session_params)):
        _refuse("logprob_start_len", start, f"-1 or at most the prompt's {tokens} tokens")
    for index in obj.multi_item_delimiter_indices or ():
        if not 0 <= index < tokens:
            _refuse("multi_item_delimiter_indices", index, f"indices below {tokens}")


def check_wire(tokenized: Any) -> None:
    """Encode and decode the message as the scheduler will, without its large or pickled parts."""
    import msgspec
    from sglang.srt.managers import io_struct

    small = copy.copy(tokenized)
    for name in ("input_ids", "mm_inputs", "time_stats"):
        setattr(small, name, None)
    try:
        io_struct.msgpack_decode(io_struct.msgpack_encode(small))
    except (msgspec.MsgspecError, *MALFORMED) as error:
        # The message is an array: find the field that the decoder's path counts.
        raise ValueError(f"{_field(error, type(tokenized))}: {error}") from error


def _field(error: Exception, kind: type) -> str:
    import msgspec

    place = re.search(r"\$\[(\d+)\]", str(error))
    names = [f.name for f in msgspec.structs.fields(kind)]
    index = int(place[1]) - 1 if place else -1  # the first entry is the tag of the type
    return f"{names[index]} has a wrong type" if 0 <= index < len(names) else "a wrong type"


def longest_text(manager: Any) -> int:
    """No text of more characters than this fits the context.

    A token stands for at most as many characters as the longest entry of the vocabulary, and a
    tokenizer that composes Unicode characters first shortens its input by a small factor.
    """
    known = manager.__dict__.get("_sgl_det_longest_text")
    if known is None:
        longest = max(map(len, manager.tokenizer.get_vocab()))
        known = manager._sgl_det_longest_text = 4 * longest * manager.context_len
    return known
