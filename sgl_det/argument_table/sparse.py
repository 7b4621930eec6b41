"""Arguments of mixtures of experts, recurrent layers and diffusion models."""

from __future__ import annotations

from sgl_det.arguments import part_of, refused

_MOE = "mixture_of_experts"
_HYBRID = "hybrid_attention"
_EPLB = "how experts are moved between GPUs"
_ELASTIC = "how GPUs join and leave a group of experts"
_KT = "experts computed on the CPU by ktransformers"
_REPLAY = "how recurrent states are buffered between decode steps"

SPARSE = {
    # Experts.
    "moe_runner_backend": part_of(_MOE, "the kernel of the experts"),
    "moe_a2a_backend": part_of(_MOE, "how experts exchange tokens"),
    "flashinfer_mxfp4_moe_precision": part_of(_MOE, "the precision of the experts"),
    "deepep_mode": part_of(_MOE, "how experts exchange tokens"),
    "fuseep_mode": part_of(_MOE, "how experts exchange tokens"),
    "deepep_dispatcher_output_dtype": part_of(_MOE, "how experts exchange tokens"),
    "deepep_config": part_of(_MOE, "how experts exchange tokens"),
    "enable_fused_moe_sum_all_reduce": part_of(_MOE, "where the experts' outputs are summed"),
    "disable_flashinfer_cutlass_moe_fp4_allgather": part_of(_MOE, "how experts exchange tokens"),
    "disable_shared_experts_fusion": part_of(_MOE, "whether the shared expert is fused"),
    "enforce_shared_experts_fusion": part_of(_MOE, "whether the shared expert is fused"),
    "enable_waterfill": part_of(_MOE, "which GPU computes the shared expert"),
    "ep_num_redundant_experts": part_of(_MOE, _EPLB),
    "ep_dispatch_algorithm": part_of(_MOE, "which copy of an expert is used"),
    "init_expert_location": part_of(_MOE, "which GPU holds which expert"),
    "enable_eplb": part_of(_MOE, _EPLB),
    "eplb_algorithm": part_of(_MOE, _EPLB),
    "eplb_rebalance_num_iterations": part_of(_MOE, _EPLB),
    "eplb_rebalance_layers_per_chunk": part_of(_MOE, _EPLB),
    "eplb_min_rebalancing_utilization_threshold": part_of(_MOE, _EPLB),
    "expert_distribution_recorder_mode": part_of(_MOE, "statistics of the experts"),
    "expert_distribution_recorder_buffer_size": part_of(_MOE, "statistics of the experts"),
    "enable_expert_distribution_metrics": part_of(_MOE, "statistics of the experts"),
    "enable_return_routed_experts": part_of(_MOE, "names the chosen experts in answers"),
    "enable_return_indexer_topk": part_of("mla", "names the chosen keys in answers"),
    "elastic_ep_backend": part_of(_MOE, _ELASTIC),
    "enable_elastic_expert_backup": part_of(_MOE, _ELASTIC),
    "mooncake_ib_device": part_of(_MOE, "which network connects the experts"),
    "ep_join_mode": part_of("ep_size", _ELASTIC),
    "ep_join_rank_offset": part_of("ep_size", _ELASTIC),
    "elastic_ep_initial_size": part_of("ep_size", _ELASTIC),
    "max_ep_size": part_of("ep_size", _ELASTIC),
    "elastic_ep_scale_timeout": part_of("ep_size", _ELASTIC),
    "elastic_ep_rejoin": part_of("ep_size", _ELASTIC),
    "kt_weight_path": part_of(_MOE, _KT),
    "kt_method": part_of(_MOE, _KT),
    "kt_cpuinfer": part_of(_MOE, _KT),
    "kt_threadpool_count": part_of(_MOE, _KT),
    "kt_num_gpu_experts": part_of(_MOE, _KT),
    "kt_max_deferred_experts_per_token": part_of(_MOE, _KT),
    # Recurrent layers.
    "mamba_backend": part_of(_HYBRID, "the kernel of Mamba layers"),
    "max_mamba_cache_size": part_of(_HYBRID, "how many states are kept"),
    "mamba_ssm_dtype": part_of(_HYBRID, "the precision of states"),
    "mamba_max_states_per_path": part_of(_HYBRID, "how many states are kept"),
    "enable_mamba_cache_stochastic_rounding": part_of(_HYBRID, "random rounding of states"),
    "mamba_cache_philox_rounds": part_of(_HYBRID, "random rounding of states"),
    "mamba_full_memory_ratio": part_of(_HYBRID, "memory for states"),
    "mamba_radix_cache_strategy": part_of(_HYBRID, "which states the cache keeps"),
    "uses_mamba_radix_cache": part_of(_HYBRID, "derived from the architecture"),
    "mamba_track_interval": part_of(_HYBRID, "which states the cache keeps"),
    "enable_int8_mamba_checkpoint": part_of(_HYBRID, "the precision of cached states"),
    "int8_mamba_ckpt_size": part_of(_HYBRID, "how many cached states are kept"),
    "linear_attn_backend": part_of(_HYBRID, "the kernel of linear attention"),
    "linear_attn_decode_backend": part_of(_HYBRID, "its kernel in decode"),
    "linear_attn_prefill_backend": part_of(_HYBRID, "its kernel in prefill"),
    "linear_attn_verify_backend": part_of(_HYBRID, "its kernel in verification"),
    "enable_linear_replayssm": part_of(_HYBRID, _REPLAY),
    "linear_replayssm_cache_len": part_of(_HYBRID, _REPLAY),
    "enable_linear_replayssm_spec": part_of(_HYBRID, _REPLAY),
    # Diffusion.
    "dllm_algorithm": refused("a diffusion model fills in a block of tokens at once, not one"),
    "dllm_algorithm_config": part_of("dllm_algorithm", "settings of the algorithm"),
    "dllm_fdfo": part_of("dllm_algorithm", "in which order blocks finish"),
}
