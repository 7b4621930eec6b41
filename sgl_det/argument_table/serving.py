"""Arguments of the HTTP server, the tokenizer and the processes around the scheduler."""

from __future__ import annotations

from sgl_det.arguments import neutral, not_claimed, one_of, part_of, refused
from sgl_det.axis import Axis

_TO_IDS = "turns text into token ids before the scheduler sees the request"
_GRPC = "the gRPC server has neither GET /determinism nor our checks of requests"

SERVING = {
    # From text to token ids and back.
    "tokenizer_path": neutral(f"the tokenizer {_TO_IDS}"),
    "tokenizer_mode": neutral(f"the fast and the slow tokenizer each {_TO_IDS}"),
    "tokenizer_backend": neutral(f"either library {_TO_IDS}"),
    "skip_tokenizer_init": neutral("requests then carry token ids themselves"),
    "tokenizer_worker_num": refused(
        "several tokenizer workers load no plugin, so our checks of requests are missing in them",
    ),
    "detokenizer_worker_num": refused(
        "the hand-over of streamed tokens between several detokenizers has not been reviewed",
        drops=(Axis.STREAMING,),
    ),
    "enable_dynamic_batch_tokenizer": neutral("collects prompts; each is tokenized by itself"),
    "dynamic_batch_tokenizer_batch_size": neutral("how many prompts are tokenized in one call"),
    "dynamic_batch_tokenizer_batch_timeout": neutral("how long the tokenizer waits for more"),
    "enable_tokenizer_batch_encode": neutral("one tokenizer call for a list, without padding"),
    "disable_tokenizer_batch_decode": neutral("ids become text after they are chosen"),
    "chat_template": neutral("renders messages to a prompt, per request"),
    "hf_chat_template_name": neutral("picks the template that renders messages, per request"),
    "completion_template": neutral("renders a completion request to a prompt, per request"),
    "default_chat_template_kwargs": neutral("fills in template variables, per request"),
    "reasoning_parser": neutral("separates finished text into reasoning and answer"),
    "tool_call_parser": neutral("separates finished text into tool calls and answer"),
    "tool_server": neutral("what a tool answers becomes part of the next prompt"),
    "sampling_defaults": neutral("fills in sampling parameters, equally for each request"),
    "preferred_sampling_params": neutral("fills in sampling parameters, equally for each request"),
    "allow_auto_truncate": not_claimed(
        "where a long prompt is cut depends on the size of the KV pool, and so on the memory that "
        "was free at start-up",
        Axis.RESTART,
    ),
    # Grammars.
    "constrained_json_whitespace_pattern": neutral("is part of the grammar of each request"),
    "constrained_json_disable_any_whitespace": neutral("is part of the grammar of each request"),
    "enable_strict_thinking": not_claimed(
        "its token filter during reasoning has not been tested", Axis.STRUCTURED
    ),
    "grammar_backend": not_claimed(
        "grammar masks of this backend have not been tested",
        Axis.STRUCTURED,
        allowed=one_of(None, "xgrammar", "none"),
    ),
    "disable_outlines_disk_cache": neutral("where compiled grammars are kept"),
    # Sending answers.
    "stream_interval": neutral("how many finished tokens are sent at once"),
    "batch_notify_size": neutral("how many waiting clients are woken at once"),
    "stream_response_default_include_usage": neutral("adds token counts to streamed answers"),
    "incremental_streaming_output": neutral("sends each finished token once, or all each time"),
    "enable_cache_report": neutral("adds the number of cached tokens to answers"),
    "enable_streaming_session": refused(
        "a session keeps KV outside the radix cache, along a path that has not been reviewed"
    ),
    # The listening server.
    "host": neutral("where the server listens"),
    "port": neutral("where the server listens"),
    "fastapi_root_path": neutral("the path under which a proxy shows the server"),
    "smg_grpc_mode": refused(_GRPC, liftable=False),
    "grpc_mode": refused(_GRPC, liftable=False),
    "grpc_port": refused("requests over gRPC pass beside our checks and our response header"),
    "smg_http_sidecar_port": part_of("smg_grpc_mode", "where its metrics are served"),
    "sidecar": part_of("grpc_port", "a helper process beside the gRPC server"),
    "sidecar_args": part_of("grpc_port", "arguments of that helper process"),
    "skip_server_warmup": neutral("whether a request is sent at start-up"),
    "warmups": neutral("which requests are sent at start-up"),
    "enable_http2": refused(
        "Granian has not been tried with GET /determinism and the response header",
        drops=(Axis.STREAMING,),
    ),
    "ssl_keyfile": neutral("encrypts the connection"),
    "ssl_certfile": neutral("encrypts the connection"),
    "ssl_ca_certs": neutral("checks the other side of the connection"),
    "ssl_keyfile_password": neutral("opens the key file"),
    "enable_ssl_refresh": neutral("reads renewed certificates"),
    "api_key": neutral("who may ask"),
    "admin_api_key": neutral("who may administer"),
    "served_model_name": neutral("the model's name in answers"),
    "weight_version": neutral("a label in answers; the numerics key holds a digest of the weights"),
    "file_storage_path": neutral("where uploaded files are kept"),
}
