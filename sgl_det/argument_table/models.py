"""Arguments that say which model is served, and how its weights are loaded."""

from __future__ import annotations

from typing import Any

from sgl_det.arguments import Context, claimed, neutral, one_of, part_of, refused


def _kv_dtype_of_model(value: Any, context: Context) -> bool:
    dtype = str(context.model_config.dtype).removeprefix("torch.")
    return value == "auto" or {"bf16": "bfloat16"}.get(value, value) == dtype


_JUDGED = "the resulting model config is judged, not this argument"
_DIGEST = "the digest in the numerics key is taken from the weights that were loaded"
_ELSEWHERE = "weights from another server; not a load format that was reviewed"

MODELS = {
    "model_path": claimed(f"names the model; {_DIGEST}"),
    "revision": claimed(f"names the model's version; {_DIGEST}"),
    "download_dir": neutral("where downloaded files are kept"),
    "model_checksum": neutral("compares files with a list before they are loaded"),
    "trust_remote_code": claimed(f"loads a config class of the model's author; {_JUDGED}"),
    "model_config_parser": claimed(f"how config files are read; {_JUDGED}"),
    "json_model_override_args": claimed(f"changes the model config; {_JUDGED}"),
    "decrypted_config_file": claimed(f"another place of the model config; {_JUDGED}"),
    "context_length": claimed("bounds prompts; longest lengths are judged with the backend"),
    "dtype": claimed("is part of the numerics key; the backend's dtypes are judged with the model"),
    "is_embedding": refused(
        "embeddings are pooled over the sequence along a path that has not been reviewed"
    ),
    "model_impl": refused(
        "other model code than SGLang's own reaches operators that are not replaced",
        one_of("auto", "sglang"),
        "'auto' or 'sglang'",
    ),
    # Quantised weights and KV.
    "quantization": refused(
        "quantised matrix products choose their kernel and tile by the number of rows",
        way_out="serve the unquantised weights",
    ),
    "quantization_param_path": part_of("kv_cache_dtype", "scales of an FP8 KV cache"),
    "kv_cache_dtype": refused(
        "prefill and decode round a quantised KV cache differently",
        _kv_dtype_of_model,
        "'auto' or the model's dtype",
    ),
    "modelopt_quant": refused("it quantises the weights, whose kernels follow the number of rows"),
    "modelopt_checkpoint_restore_path": part_of("modelopt_quant", "a quantised checkpoint to read"),
    "modelopt_checkpoint_save_path": part_of("modelopt_quant", "a quantised checkpoint to write"),
    "modelopt_export_path": part_of("modelopt_quant", "a quantised checkpoint to export"),
    "quantize_and_serve": refused("it quantises the weights at start-up"),
    "rl_quant_profile": part_of("load_format", "the profile of format flash_rl"),
    # Loading.
    "load_format": refused(
        "other formats hold quantised weights, or take them from elsewhere than files",
        one_of("auto", "safetensors", "pt", "npcache", "dummy", "mistral", "fastsafetensors"),
        "a format of unquantised files",
        way_out="use --load-format auto",
    ),
    "model_loader_extra_config": neutral(f"how files are read; {_DIGEST}"),
    "custom_weight_loader": refused(
        "a loader of the user's may put any values into the weights at any time",
        one_of(None, []),
        "none",
    ),
    "weight_loader_disable_mmap": neutral("how files are read"),
    "weight_loader_prefetch_checkpoints": neutral("reads files ahead of use"),
    "weight_loader_prefetch_num_threads": neutral("reads files ahead of use"),
    "weight_loader_drop_cache_after_load": neutral("frees the page cache after loading"),
    "delete_ckpt_after_loading": neutral("removes files that are no longer read"),
    "checkpoint_engine_wait_weights_before_ready": claimed(
        "weights that arrive later renew the digest in the numerics key"
    ),
    "remote_instance_weight_loader_seed_instance_ip": part_of("load_format", _ELSEWHERE),
    "remote_instance_weight_loader_seed_instance_service_port": part_of("load_format", _ELSEWHERE),
    "remote_instance_weight_loader_send_weights_group_ports": part_of("load_format", _ELSEWHERE),
    "remote_instance_weight_loader_backend": part_of("load_format", _ELSEWHERE),
    "remote_instance_weight_loader_start_seed_via_transfer_engine": neutral(
        "lets other servers copy these weights"
    ),
    "engine_info_bootstrap_port": neutral("where other servers ask for these weights"),
    "modelexpress_config": part_of("load_format", _ELSEWHERE),
    "weight_cache_mode": refused(
        "the weights then live in another process, which may change them without our digest"
    ),
    "weight_cache_socket": part_of("weight_cache_mode", "where that process listens"),
    "weight_cache_timeout": part_of("weight_cache_mode", "how long to wait for that process"),
    "enable_memory_saver": claimed("memory given back is filled again, and hashed again"),
    "enable_weights_cpu_backup": claimed("weights come back from the copy, and are hashed again"),
    "enable_draft_weights_cpu_backup": part_of("speculative_algorithm", "a copy of draft weights"),
}
