"""Arguments for logs, metrics, traces and debugging."""

from __future__ import annotations

from sgl_det.arguments import neutral, part_of, refused

_FROM_TIMES = "computed from times and counts"

OBSERVABILITY = {
    "log_level": neutral("what is written to the log"),
    "log_level_http": neutral("what the HTTP server writes to the log"),
    "log_requests": neutral("writes requests to the log"),
    "log_requests_level": neutral("how much of a request is written to the log"),
    "log_requests_format": neutral("the format of logged requests"),
    "log_requests_target": neutral("where logged requests go"),
    "uvicorn_access_log_exclude_prefixes": neutral("which paths stay out of the access log"),
    "crash_dump_folder": neutral("where recent requests are written after a crash"),
    "show_time_cost": neutral("logs how long marked parts take"),
    "decode_log_interval": neutral("how often the scheduler writes a log line"),
    "enable_request_time_stats_logging": neutral("logs the times of each request"),
    "gc_warning_threshold_secs": neutral("logs long garbage collections"),
    # Metrics and traces.
    "enable_metrics": neutral(f"Prometheus metrics, {_FROM_TIMES}"),
    "enable_mfu_metrics": neutral(f"estimated utilisation, {_FROM_TIMES}"),
    "enable_metrics_for_all_schedulers": neutral(f"metrics of every rank, {_FROM_TIMES}"),
    "load_snapshot_publish_interval": neutral("how often the load is published"),
    "tokenizer_metrics_custom_labels_header": neutral("the header that carries metric labels"),
    "tokenizer_metrics_allowed_custom_labels": neutral("which metric labels are allowed"),
    "extra_metric_labels": neutral("labels added to metrics"),
    "bucket_time_to_first_token": neutral("buckets of a histogram"),
    "bucket_inter_token_latency": neutral("buckets of a histogram"),
    "bucket_e2e_request_latency": neutral("buckets of a histogram"),
    "prompt_tokens_buckets": neutral("buckets of a histogram"),
    "generation_tokens_buckets": neutral("buckets of a histogram"),
    "kv_events_config": neutral("publishes which blocks the cache holds"),
    "enable_forward_pass_metrics": neutral(f"figures per step, {_FROM_TIMES}"),
    "forward_pass_metrics_worker_id": neutral("a label of the figures per step"),
    "forward_pass_metrics_ipc_name": neutral("where the figures per step are published"),
    "enable_trace": neutral("OpenTelemetry spans around requests"),
    "trace_modules": neutral("which modules emit spans"),
    "otlp_traces_endpoint": neutral("where spans are sent"),
    "export_metrics_to_file": neutral("writes the times of each request to a file"),
    "export_metrics_to_file_dir": neutral("where those files are written"),
    "stat_loggers": neutral(f"user classes that receive figures, {_FROM_TIMES}"),
    "enable_layerwise_nvtx_marker": neutral("names the layers in a profile"),
    # What reaches into the forward pass.
    "kv_canary": refused(
        "it adds kernels over the KV pool to each forward pass that have not been reviewed"
    ),
    "kv_canary_real_data": part_of("kv_canary", "what the canary checks"),
    "kv_canary_sweep_interval": part_of("kv_canary", "how often the canary reads the whole pool"),
    "debug_tensor_dump_output_folder": refused(
        "dumping tensors runs each layer through hooks outside CUDA graphs"
    ),
    "debug_tensor_dump_layers": part_of("debug_tensor_dump_output_folder", "which layers to dump"),
    "debug_tensor_dump_input_file": refused(
        "the given input replaces what requests send", liftable=False
    ),
    "forward_hooks": refused("hooks are code that may change any activation"),
    "msprobe_dump_config": refused("msProbe hooks into each layer of the model"),
}
