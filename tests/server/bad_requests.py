"""Requests that no server should accept: malformed, of the wrong type, or out of range.

Each has a status class of 4xx and a word that its reason must contain. They are data, in one table
(hence the length of this file), so that one test sends them all to one server.

Longer than 300 lines because they are one table of requests.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

HUGE = 2**70  # beyond 64 bits
OUTSIDE = 10**9  # a 64-bit integer outside every vocabulary and every context
PROMPT = "The quick brown fox"


@dataclass(frozen=True, slots=True)
class BadRequest:
    """One request; ``reason`` is looked for in the answer's reason, in any case."""

    name: str
    route: str
    body: bytes
    reason: str
    content_type: str = "application/json"

    def __str__(self) -> str:
        return self.name


def _raw(name: str, reason: str, body: bytes, route: str = "/generate", **kwargs) -> BadRequest:
    return BadRequest(name, route, body, reason, **kwargs)


def _post(name: str, reason: str, route: str, body: Any) -> BadRequest:
    return BadRequest(name, route, json.dumps(body).encode(), reason)


def _generate(name: str, reason: str, **body: Any) -> BadRequest:
    """The native route, with a prompt unless one is given."""
    given = {"text", "input_ids", "input_embeds"} & body.keys()
    body = {
        **({} if given else {"text": PROMPT}),
        "sampling_params": {"max_new_tokens": 2},
        **body,
    }
    return _post(name, reason, "/generate", body)


def _param(key: str, label: str, value: Any, reason: str = "", **others: Any) -> BadRequest:
    """The native route with one bad sampling parameter."""
    params = {"max_new_tokens": 2, **others, key: value}
    return _generate(f"{key}-{label}", reason or key, sampling_params=params)


def _completion(name: str, reason: str, **body: Any) -> BadRequest:
    body = {"model": "default", "prompt": PROMPT, "max_tokens": 2, **body}
    return _post(f"completions-{name}", reason, "/v1/completions", body)


def _chat(name: str, reason: str, **body: Any) -> BadRequest:
    messages = [{"role": "user", "content": PROMPT}]
    body = {"model": "default", "messages": messages, "max_tokens": 2, **body}
    return _post(f"chat-{name}", reason, "/v1/chat/completions", body)


def _part(kind: str, url: str) -> list[dict]:
    return [{"role": "user", "content": [{"type": kind, kind: {"url": url}}]}]


HTTP = (
    _raw("body-truncated", "json", b'{"text": "x", '),
    _raw("body-empty", "body", b""),
    _raw("body-null", "body", b"null"),
    _raw("body-list", "body", b"[]"),
    _raw("body-number", "body", b"7"),
    _raw("body-bare-nan", "json", b'{"text": "x", "sampling_params": {"temperature": NaN}}'),
    _raw("body-bare-infinity", "json", b'{"text": "x", "sampling_params": {"top_p": Infinity}}'),
    _raw("body-not-utf8", "json", b'{"text": "\xff\xfe"}'),
    _raw("body-lone-surrogate", "json", b'{"text": "\\ud800"}'),
    _raw("body-single-quotes", "json", b"{'text': 'x'}"),
    _raw("body-deep", "json", b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    _raw("body-deep-text", "text", b'{"text": ' + b"[" * 500 + b"]" * 500 + b"}"),
    _raw("body-deep-params", "regex",
         b'{"text": "x", "sampling_params": {"regex": ' + b"[" * 300 + b"]" * 300 + b"}}"),
    _raw("body-5-megabytes", "length", json.dumps({"text": "ab " * 1_700_000}).encode()),
    _raw("body-5-megabytes-of-junk", "text", json.dumps({"text": {"x": "y" * 5_000_000}}).encode()),
    _raw("type-plain-text", "body", b'{"text": "x"}', content_type="text/plain"),
    _raw("type-form", "body", b"text=x", content_type="application/x-www-form-urlencoded"),
    _raw("completions-plain-text", "json", b'{"prompt": "x"}', "/v1/completions",
         content_type="text/plain"),
    _raw("completions-body-truncated", "json", b'{"prompt": ', "/v1/completions"),
    _raw("chat-body-truncated", "json", b'{"messages": [', "/v1/chat/completions"),
)  # fmt: skip

PROMPTS = (
    _post("prompt-missing", "text", "/generate", {"sampling_params": {}}),
    _generate("text-empty", "empty", text=""),
    _generate("text-number", "text", text=5),
    _generate("text-object", "text", text={"a": 1}),
    _generate("text-empty-batch", "empty", text=[]),
    _generate("text-batch-with-empty", "empty", text=["a", ""]),
    _generate("text-batch-with-number", "text", text=["a", 3]),
    _generate("text-beyond-context", "length", text="word " * 100_000),
    _generate("ids-empty", "empty", input_ids=[]),
    _generate("ids-empty-rows", "empty", input_ids=[[]]),
    _generate("ids-one-empty-row", "empty", input_ids=[[1, 2], []]),
    _generate("ids-mixed", "input_ids", input_ids=[1, [2]]),
    _generate("ids-mixed-batch", "input_ids", input_ids=[[1], 2]),
    _generate("ids-nested-too-deep", "input_ids", input_ids=[[[1]]]),
    _generate("ids-strings", "input_ids", input_ids=["1", "2"]),
    _generate("ids-floats", "input_ids", input_ids=[1, 2.5]),
    _generate("ids-number", "input_ids", input_ids=7),
    _generate("ids-negative", "vocab", input_ids=[1, -1, 2]),
    _generate("ids-outside-vocabulary", "vocab", input_ids=[1, OUTSIDE]),
    _generate("ids-outside-vocabulary-in-batch", "vocab", input_ids=[[1, 2], [OUTSIDE]]),
    _generate("ids-beyond-64-bits", "input_ids", input_ids=[HUGE]),
    _generate("ids-beyond-context", "length", input_ids=[7] * 200_000),
    _generate("embeds-without-support", "input_embeds", input_embeds=[[0.5, 0.5]]),
    _generate("embeds-empty", "input_embeds", input_embeds=[]),
    _generate("embeds-empty-row", "input_embeds", input_embeds=[[]]),
    _generate("embeds-ints", "input_embeds", input_embeds=[1, 2]),
    _generate("image-to-text-model", "image", image_data="data:image/png;base64,AAAA"),
    _generate("video-to-text-model", "video", video_data="clip.mp4"),
    _generate("audio-to-text-model", "audio", audio_data="sound.wav"),
)

SAMPLING = (
    _generate("params-text", "sampling_params", sampling_params="greedy"),
    _generate("params-number", "sampling_params", sampling_params=3),
    _generate("params-list-for-one", "sampling_params", sampling_params=[{"top_p": 1.0}]),
    _param("temprature", "unknown-name", 1.0),
    _param("temperature", "negative", -0.5),
    _param("temperature", "text", "hot"),
    _param("temperature", "list", [1.0]),
    _param("temperature", "object", {}),
    _param("temperature", "beyond-float32", 1e39),
    _param("top_p", "zero", 0.0),
    _param("top_p", "above-one", 1.5),
    _param("top_p", "negative", -0.1),
    _param("top_p", "text", "0.9"),
    _param("top_k", "zero", 0),
    _param("top_k", "negative", -5),
    _param("top_k", "beyond-32-bits", 2**40),
    _param("top_k", "fraction", 2.5),
    _param("top_k", "text", "all"),
    _param("min_p", "negative", -0.1),
    _param("min_p", "above-one", 1.1),
    _param("min_p", "text", "small"),
    _param("frequency_penalty", "too-large", 3.0),
    _param("frequency_penalty", "text", "x"),
    _param("presence_penalty", "too-small", -3.0),
    _param("presence_penalty", "list", []),
    _param("repetition_penalty", "zero", 0.0),
    _param("repetition_penalty", "denormal", 1e-40),
    _param("repetition_penalty", "too-large", 2.5),
    _param("repetition_penalty", "text", "x"),
    _param("max_new_tokens", "negative", -1),
    _param("max_new_tokens", "text", "many"),
    _param("max_new_tokens", "fraction", 1.5),
    _param("max_new_tokens", "list", [4]),
    _param("max_new_tokens", "beyond-64-bits", HUGE),
    _param("min_new_tokens", "negative", -1),
    _param("min_new_tokens", "above-max", 50),
    _param("min_new_tokens", "text", "x"),
    _param("n", "zero", 0),
    _param("n", "negative", -1),
    _param("n", "million", 10**6),
    _param("n", "fraction", 1.5),
    _param("n", "text", "two"),
    _param("stop", "number", 7),
    _param("stop", "numbers", [1, 2]),
    _param("stop", "object", {"a": 1}),
    _param("stop_token_ids", "number", 7),
    _param("stop_token_ids", "text", ["a"]),
    _param("stop_token_ids", "negative", [-1]),
    _param("stop_token_ids", "outside-vocabulary", [OUTSIDE]),
    _param("stop_regex", "unbalanced", "(", "regex"),
    _param("stop_regex", "number", 7),
    _param("ignore_eos", "text", "yes"),
    _param("skip_special_tokens", "number", 7),
    _param("no_stop_trim", "list", []),
    _param("stream_interval", "zero", 0),
    _param("stream_interval", "negative", -1),
    _param("stream_interval", "text", "x"),
    _param("logit_bias", "outside-vocabulary", {str(OUTSIDE): 1.0}),
    _param("logit_bias", "negative-id", {"-1": 1.0}),
    _param("logit_bias", "word", {"cat": 1.0}),
    _param("logit_bias", "text-value", {"5": "x"}),
    _param("logit_bias", "null-value", {"5": None}),
    _param("logit_bias", "beyond-float32", {"5": 1e39}),
    _param("logit_bias", "infinite-after-temperature", {"5": 3e38}, temperature=0.5),
    _param("logit_bias", "list", [1, 2]),
    _param("sampling_seed", "beyond-64-bits", 2**63),
    _param("sampling_seed", "fraction", 1.5),
    _param("sampling_seed", "text", "lucky"),
    _param("sampling_seed", "bool", True),
    _param("seed", "beyond-64-bits", -(2**63) - 1),
    _generate("seed-at-the-top-text", "seed", seed="lucky"),
    _generate("seeds-that-differ", "seed", seed=1, sampling_params={"sampling_seed": 2}),
    _generate(
        "seeds-that-differ-in-a-batch",
        "seed",
        text=["a", "b"],
        seed=1,
        sampling_params=[{"seed": 1}, {"seed": 2}],
    ),
    _param("custom_params", "text", "x"),
    _param("is_normalized", "internal", True),
    _param("stop_strs", "internal", 5),
    _param("stop_str_max_len", "internal", "x"),
    _generate("params-batch-too-short", "sampling_params", text=["a", "b"], sampling_params=[{}]),
    _generate("params-empty-batch", "sampling_params", text=["a", "b"], sampling_params=[]),
    _generate("params-batch-of-text", "sampling_params", text=["a"], sampling_params=["x"]),
    _generate("n-differs-in-batch", "n", text=["a", "b"], sampling_params=[{"n": 1}, {"n": 2}]),
)

GRAMMARS = (
    _param("regex", "unbalanced", "(a"),
    _param("regex", "number", 7),
    _param("json_schema", "not-json", "{", "json"),
    _param("json_schema", "not-a-schema", '"x"', "json"),
    _param("json_schema", "unknown-type", '{"type": "alien"}', "json"),
    _param("json_schema", "deep", '{"items":' * 900 + "{}" + "}" * 900, "nested"),
    _param("json_schema", "deeper", '{"items":' * 50_000 + "{}" + "}" * 50_000, "json"),
    _param("regex", "deep", "(" * 100_000 + "a" + ")" * 100_000),
    _param("stop_regex", "deep", "(" * 5000 + ")" * 5000, "recursion"),
    _param("json_schema", "object-for-text", {"type": "object"}),
    _param("ebnf", "no-root", "a ::= b", "ebnf"),
    _param("structural_tag", "text", "x", "structural_tag"),
    _param("regex", "with-json-schema", "a", "one of", json_schema="{}"),
    _completion("regex-unbalanced", "regex", regex="(a"),
    _chat("response-format-unknown", "response_format", response_format={"type": "alien"}),
    _chat("response-format-no-schema", "schema", response_format={"type": "json_schema"}),
)

LOGPROBS = (
    _generate("logprob-start-negative", "logprob_start_len", return_logprob=True,
              logprob_start_len=-2),
    _generate("logprob-start-beyond-prompt", "logprob_start_len", return_logprob=True,
              logprob_start_len=10_000),
    _generate("logprob-start-text", "logprob_start_len", return_logprob=True,
              logprob_start_len="x"),
    _generate("top-logprobs-negative", "top_logprobs_num", return_logprob=True,
              top_logprobs_num=-1),
    _generate("top-logprobs-beyond-vocabulary", "top_logprobs_num", return_logprob=True,
              top_logprobs_num=OUTSIDE),
    _generate("top-logprobs-text", "top_logprobs_num", return_logprob=True,
              top_logprobs_num="x"),
    _generate("top-logprobs-fraction", "top_logprobs_num", return_logprob=True,
              top_logprobs_num=1.5),
    _generate("token-ids-logprob-outside", "token_ids_logprob", return_logprob=True,
              token_ids_logprob=[OUTSIDE]),
    _generate("token-ids-logprob-negative", "token_ids_logprob", return_logprob=True,
              token_ids_logprob=[-1]),
    _generate("token-ids-logprob-text", "token_ids_logprob", return_logprob=True,
              token_ids_logprob=["x"]),
    _generate("token-ids-logprob-nested", "token_ids_logprob", return_logprob=True,
              token_ids_logprob=[[1]]),
    _generate("return-logprob-text", "return_logprob", return_logprob="maybe"),
    _generate("return-logprob-list-for-one", "return_logprob", return_logprob=[True]),
    _generate("flat-logprobs-b64-alone", "return_flat_raw", return_flat_raw_top_logprobs_b64=True),
    _generate("hidden-states-not-enabled", "hidden", return_hidden_states=True),
    _generate("hidden-states-unknown", "return_hidden_states", return_hidden_states="some"),
    _generate("sampling-mask", "return_sampling_mask", return_sampling_mask=True),
)  # fmt: skip

FIELDS = (
    _generate("rid-number", "rid", rid=5),
    _generate("rid-list-for-one", "rid", rid=["a"]),
    _generate("rid-empty", "rid", rid=""),
    _generate("rid-of-health-check", "rid", rid="HEALTH_CHECK_me"),
    _generate("rid-twice-in-batch", "duplicate", text=["a", "b"], rid=["x", "x"]),
    _generate("rid-batch-too-short", "rid", text=["a", "b"], rid=["x"]),
    _generate("stream-text", "stream", stream="perhaps"),
    _generate("lora-not-enabled", "lora", lora_path="adapter"),
    _generate("lora-id-not-enabled", "lora", lora_id="adapter"),
    _generate("logit-processor-not-enabled", "logit processor", custom_logit_processor="x"),
    _generate("session-unknown", "session", session_params={"id": "nobody"}),
    _generate("session-unknown-field", "session_params", session_params={"name": "nobody"}),
    _generate("session-id-number", "session_params", session_params={"id": 5}),
    _generate("session-twice", "session", session_id="a", session_params={"id": "a"}),
    _generate("priority-text", "priority", priority="high"),
    _generate("priority-fraction", "priority", priority=1.5),
    _generate("dp-rank-outside", "dp_rank", routed_dp_rank=5),
    _generate("dp-rank-negative", "dp_rank", routed_dp_rank=-1),
    _generate("bootstrap-port-text", "bootstrap_port", bootstrap_port="x"),
    _generate("bootstrap-room-list-for-one", "bootstrap_room", bootstrap_room=[1]),
    _generate("extra-key-number", "extra_key", extra_key=5),
    _generate("extra-key-list-for-one", "extra_key", extra_key=["a"]),
    _generate("thinking-not-enabled", "max_thinking_tokens", max_thinking_tokens=4),
    _generate("embed-overrides", "positional_embed_overrides", positional_embed_overrides={"a": 1}),
    _generate("delimiters-beyond-prompt", "multi_item", multi_item_delimiter_indices=[OUTSIDE]),
    _generate("worker-address", "http_worker_ipc", http_worker_ipc="ipc:///nowhere"),
    _generate("return-logprob-batch-too-short", "return_logprob", text=["a", "b"],
              return_logprob=[True]),
    _generate("logprob-start-batch-too-short", "logprob_start_len", text=["a", "b"],
              logprob_start_len=[0]),
    _generate("top-logprobs-batch-too-long", "top_logprobs_num", text=["a", "b"],
              top_logprobs_num=[1, 1, 1]),
    _generate("token-ids-logprob-batch-too-short", "token_ids_logprob", text=["a", "b"],
              token_ids_logprob=[[1]]),
    _generate("lora-batch-too-short", "lora", text=["a", "b"], lora_path=["x"]),
    _generate("logit-processor-batch-too-short", "logit", text=["a", "b"],
              custom_logit_processor=["x"]),
    _generate("extra-key-batch-too-short", "extra_key", text=["a", "b"], extra_key=["x"]),
)  # fmt: skip

STREAMS = (
    _generate("stream-temperature-negative", "temperature", stream=True,
              sampling_params={"temperature": -1}),
    _generate("stream-text-empty", "empty", stream=True, text=""),
    _generate("stream-text-beyond-context", "length", stream=True, text="word " * 100_000),
    _generate("stream-n-zero", "n", stream=True, sampling_params={"n": 0}),
    _completion("stream-top-p-zero", "top_p", stream=True, top_p=0.0),
    _chat("stream-top-p-zero", "top_p", stream=True, top_p=0.0),
)  # fmt: skip

OPENAI = (
    _post("completions-prompt-missing", "prompt", "/v1/completions", {"model": "default"}),
    _completion("prompt-empty", "empty", prompt=""),
    _completion("prompt-empty-list", "empty", prompt=[]),
    _completion("prompt-number", "prompt", prompt=5),
    _completion("prompt-mixed", "prompt", prompt=["a", 1]),
    _completion("prompt-ids-outside", "vocab", prompt=[1, OUTSIDE]),
    _completion("prompt-beyond-context", "length", prompt="word " * 100_000),
    _completion("model-number", "model", model=5),
    _completion("model-with-adapter", "lora", model="default:adapter"),
    _completion("max-tokens-negative", "max", max_tokens=-1),
    _completion("max-tokens-text", "max_tokens", max_tokens="x"),
    _completion("temperature-negative", "temperature", temperature=-1),
    _completion("temperature-text", "temperature", temperature="hot"),
    _completion("top-p-above-one", "top_p", top_p=2.0),
    _completion("top-k-beyond-32-bits", "top_k", top_k=2**40),
    _completion("n-zero", "n", n=0),
    _completion("n-million", "n", n=10**6),
    _completion("logprobs-negative", "logprobs", logprobs=-1),
    _completion("logprobs-beyond-vocabulary", "logprobs", logprobs=OUTSIDE),
    _completion("stop-number", "stop", stop=5),
    _completion("seed-text", "seed", seed="lucky"),
    _completion("seed-beyond-64-bits", "seed", seed=2**63),
    _completion("logit-bias-outside", "logit_bias", logit_bias={str(OUTSIDE): 1.0}),
    _post("chat-messages-missing", "messages", "/v1/chat/completions", {"model": "default"}),
    _chat("messages-empty", "messages", messages=[]),
    _chat("messages-text", "messages", messages="hello"),
    _chat("message-of-text", "messages", messages=["hello"]),
    _chat("role-unknown", "role", messages=[{"role": "alien", "content": "x"}]),
    _chat("role-missing", "role", messages=[{"content": "x"}]),
    _chat("content-number", "content", messages=[{"role": "user", "content": 5}]),
    _chat("image-to-text-model", "image", messages=_part("image_url", "data:image/png;base64,AA")),
    _chat("audio-to-text-model", "audio", messages=_part("audio_url", "data:audio/wav;base64,AA")),
    _chat("temperature-negative", "temperature", temperature=-1),
    _chat("max-tokens-negative", "max", max_tokens=-1),
    _chat("n-zero", "n", n=0),
    _chat("stop-number", "stop", stop=5),
    _chat("seed-text", "seed", seed="x"),
    _chat("top-logprobs-beyond-vocabulary", "logprobs", logprobs=True, top_logprobs=OUTSIDE),
    _chat("top-logprobs-negative", "logprobs", logprobs=True, top_logprobs=-1),
    _chat("tools-text", "tools", tools="hammer"),
    _chat("tool-choice-without-tools", "tool", tool_choice="required"),
    _post("embeddings-of-generator", "embedding", "/v1/embeddings",
          {"model": "default", "input": "x"}),
    _post("detokenize-outside", "tokens", "/v1/detokenize",
          {"model": "default", "tokens": [HUGE // 2**8]}),
)  # fmt: skip

OTHER_ROUTES = (
    _post("ollama-temperature-text", "temperature", "/api/generate",
          {"model": "x", "prompt": "x", "stream": False,
           "options": {"temperature": "hot", "num_predict": 2}}),
    _post("ollama-stream-top-p-zero", "top_p", "/api/generate",
          {"model": "x", "prompt": "x", "stream": True,
           "options": {"top_p": 0, "num_predict": 2}}),
    _post("ollama-seeds-that-differ", "seed", "/api/generate",
          {"model": "m", "prompt": "x", "seed": 1, "options": {"seed": 2}}),
    _post("ollama-stream-seed-text", "seed", "/api/chat",
          {"model": "m", "messages": [{"role": "user", "content": "x"}], "seed": "lucky"}),
    _post("anthropic-stream-seed-huge", "seed", "/v1/messages",
          {"model": "m", "max_tokens": 2, "stream": True, "seed": 2**63,
           "messages": [{"role": "user", "content": "x"}]}),
    _post("responses-seed-fraction", "seed", "/v1/responses",
          {"model": "m", "input": "x", "seed": 1.5}),
    _post("responses-stream-seed-text", "seed", "/v1/responses",
          {"model": "m", "input": "x", "sampling_seed": "lucky", "stream": True}),
    _post("responses-background-without-seed", "seed", "/v1/responses",
          {"model": "m", "input": "x", "background": True}),
    _post("ollama-chat-messages-empty", "empty", "/api/chat",
          {"model": "x", "messages": [], "stream": False}),
    _post("anthropic-max-tokens-negative", "max_tokens", "/v1/messages",
          {"model": "x", "max_tokens": -1, "messages": [{"role": "user", "content": "x"}]}),
    _post("anthropic-messages-empty", "messages", "/v1/messages",
          {"model": "x", "max_tokens": 4, "messages": []}),
    _post("anthropic-stream-top-p-zero", "top_p", "/v1/messages",
          {"model": "x", "max_tokens": 4, "top_p": 0, "stream": True,
           "messages": [{"role": "user", "content": "x"}]}),
    _post("weights-from-missing-path", "fail", "/update_weights_from_disk",
          {"model_path": "/nowhere"}),
    _post("weights-from-number", "model_path", "/update_weights_from_disk", {"model_path": 5}),
    _post("weights-from-junk", "unpickling", "/update_weights_from_tensor",
          {"serialized_named_tensors": ["AAAA"]}),
    _post("weights-from-bad-base64", "base64", "/update_weights_from_tensor",
          {"serialized_named_tensors": ["$$$"]}),
    _post("weights-from-unknown-group", "group", "/update_weights_from_distributed",
          {"names": ["x"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "nobody"}),
    _post("weights-unknown-name", "name", "/get_weights_by_name", {"name": "nobody"}),
    _post("memory-not-released", "released", "/resume_memory_occupation", {}),
    _post("memory-unknown-tag", "tag", "/release_memory_occupation", {"tags": ["nobody"]}),
    _post("sleep-text", "forward_sleep_time", "/slow_down", {"forward_sleep_time": "x"}),
    _post("session-capacity-text", "capacity", "/open_session", {"capacity_of_str_len": "x"}),
    _post("logging-unknown-level", "level", "/configure_logging", {"log_level": "loud"}),
    _post("pause-unknown-mode", "mode", "/pause_generation", {"mode": "nap"}),
)  # fmt: skip

BAD_REQUESTS = (
    *HTTP,
    *PROMPTS,
    *SAMPLING,
    *GRAMMARS,
    *LOGPROBS,
    *FIELDS,
    *STREAMS,
    *OPENAI,
    *OTHER_ROUTES,
)
