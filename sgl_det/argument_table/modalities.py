"""Arguments of images, audio and video, and of LoRA adapters."""

from __future__ import annotations

from sgl_det.arguments import one_of, part_of, refused

_MM = "multimodal"
_LORA = "enable_lora"
_ENCODER = "language_only"

MODALITIES = {
    "enable_multimodal": part_of(_MM, "whether a multimodal model takes images"),
    "mm_attention_backend": part_of(_MM, "the attention of the vision tower"),
    "enable_broadcast_mm_inputs_process": part_of(_MM, "which process prepares images"),
    "enable_prefix_mm_cache": part_of(_MM, "a cache of image embeddings"),
    "mm_enable_dp_encoder": part_of(_MM, "how images are spread over GPUs"),
    "mm_process_config": part_of(_MM, "how images are prepared"),
    "mm_processor_worker_num": part_of(_MM, "how many threads prepare images"),
    "mm_io_worker_num": part_of(_MM, "how many threads load images"),
    "limit_mm_data_per_request": part_of(_MM, "how many images a request may hold"),
    "enable_mm_global_cache": part_of(_MM, "a cache of image embeddings"),
    "disable_fast_image_processor": part_of(_MM, "how images are prepared"),
    "mm_feature_transport": part_of(_MM, "how images reach the scheduler"),
    "keep_mm_feature_on_device": part_of(_MM, "how images reach the scheduler"),
    "asr_max_buffer_seconds": part_of(_MM, "how much audio is held back"),
    "asr_max_concurrent_sessions": part_of(_MM, "how many audio sessions are open"),
    # Encoders on other servers.
    "encoder_only": refused("an encoder's server answers no prompt", liftable=False),
    "language_only": refused(
        "its images are embedded on another server, under a numerics key not checked"
    ),
    "encoder_transfer_backend": part_of(_ENCODER, "how embeddings are sent"),
    "encoder_urls": part_of(_ENCODER, "where encoders listen"),
    "encoder_bootstrap_port": part_of(_ENCODER, "where encoders register"),
    "encoder_register_urls": part_of("encoder_only", "where this encoder registers"),
    "enable_adaptive_dispatch_to_encoder": part_of(_ENCODER, "which server takes an image"),
    # LoRA.
    _LORA: refused(
        "its kernels choose their tile by the number of tokens in the batch",
        one_of(None, False),
        "False",
    ),
    "lora_paths": refused(
        "adapters are computed in kernels whose tile follows the number of tokens in the batch",
        one_of(None, [], {}),
        "none",
    ),
    "enable_lora_overlap_loading": part_of(_LORA, "when adapters are loaded"),
    "max_lora_rank": part_of(_LORA, "the largest adapter"),
    "lora_target_modules": part_of(_LORA, "which layers adapters change"),
    "max_loaded_loras": part_of(_LORA, "how many adapters are held"),
    "max_loras_per_batch": part_of(_LORA, "how many adapters a batch mixes"),
    "lora_eviction_policy": part_of(_LORA, "which adapters are dropped"),
    "lora_backend": part_of(_LORA, "the kernel of adapters"),
    "max_lora_chunk_size": part_of(_LORA, "the tile of adapters"),
    "experts_shared_outer_loras": part_of(_LORA, "how experts share adapters"),
    "lora_use_virtual_experts": part_of(_LORA, "how experts take adapters"),
    "lora_strict_loading": part_of(_LORA, "whether unknown keys are errors"),
    "lora_drain_wait_threshold": part_of(_LORA, "when adapters are exchanged"),
}
