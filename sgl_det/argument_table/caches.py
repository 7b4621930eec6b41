"""Arguments of the KV pool, the radix cache and what lies behind it."""

from __future__ import annotations

from sgl_det.arguments import claimed, one_of, part_of, refused

_HOST = "KV that comes back from another tier has not been compared with KV that stayed"
_HICACHE = "enable_hierarchical_cache"

CACHES = {
    "page_size": refused(
        "kernels choose other tiles for pages of more than one token",
        one_of(1),
        "1",
        way_out="use --page-size 1",
    ),
    "disable_radix_cache": claimed("without the cache each prompt is computed in full"),
    "radix_eviction_policy": claimed("which prefixes are kept, which prefix_cache covers"),
    "strip_thinking_cache": claimed("which prefixes are kept, which prefix_cache covers"),
    "disable_chunked_prefix_cache": part_of("mla", "how cached prefixes meet latent attention"),
    "swa_full_tokens_ratio": claimed("divides the pool's memory between kinds of layers"),
    "disable_hybrid_swa_memory": claimed("gives windowed layers the same pool as the others"),
    "radix_cache_backend": refused("a cache of the user's may return any KV"),
    "enable_session_radix_cache": refused("the unified radix cache has not been reviewed"),
    "prefill_only_disable_kv_cache": refused("it serves embeddings, along an unreviewed path"),
    "enable_page_major_kv_layout": refused("kernels read another memory layout, not reviewed"),
    "enable_unified_memory": refused("kernels read another memory layout, not reviewed"),
    # Tiers behind the GPU's memory.
    _HICACHE: refused(_HOST),
    "hicache_ratio": part_of(_HICACHE, "the size of the host's pool"),
    "hicache_size": part_of(_HICACHE, "the size of the host's pool"),
    "hicache_write_policy": part_of(_HICACHE, "when KV is copied to the host"),
    "hicache_io_backend": part_of(_HICACHE, "how KV is copied to the host"),
    "hicache_mem_layout": part_of(_HICACHE, "how the host keeps KV"),
    "hicache_storage_backend": refused(_HOST),
    "hicache_storage_prefetch_policy": part_of(_HICACHE, "when stored KV is fetched"),
    "hicache_storage_backend_extra_config": part_of(_HICACHE, "settings of the storage"),
    "enable_hisparse": refused("it attends to a part of the keys, chosen at run time"),
    "hisparse_config": part_of("enable_hisparse", "how the keys are chosen"),
    "enable_lmcache": refused(_HOST),
    "lmcache_config_file": part_of("enable_lmcache", "settings of LMCache"),
    "enable_flexkv": refused(_HOST),
    "flexkv_config_file": part_of("enable_flexkv", "settings of FlexKV"),
    # Weights in the host's memory.
    "cpu_offload_gb": refused("offloaded layers run through wrappers that were not reviewed"),
    "offload_group_size": refused("offloaded layers run through wrappers that were not reviewed"),
    "offload_num_in_group": part_of("offload_group_size", "which layers are offloaded"),
    "offload_prefetch_step": part_of("offload_group_size", "how early layers are fetched"),
    "offload_mode": part_of("offload_group_size", "where layers are kept"),
    # Prefill and decode on two servers.
    "disaggregation_mode": refused(
        "KV from another server was computed under a numerics key that this one cannot check"
    ),
    "disaggregation_transfer_backend": part_of("disaggregation_mode", "how KV is sent"),
    "disaggregation_bootstrap_port": part_of("disaggregation_mode", "where servers meet"),
    "disaggregation_ib_device": part_of("disaggregation_mode", "which network sends KV"),
    "disaggregation_decode_enable_radix_cache": part_of(
        "disaggregation_mode", "prefixes kept on the decode server"
    ),
    "disaggregation_decode_enable_offload_kvcache": part_of(
        "disaggregation_mode", "KV kept in the decode server's host"
    ),
    "num_reserved_decode_tokens": part_of("disaggregation_mode", "memory kept for decode"),
    "disaggregation_decode_extra_slots": part_of("disaggregation_mode", "slots kept for decode"),
    "disaggregation_decode_polling_interval": part_of("disaggregation_mode", "how often to poll"),
    "optimistic_prefill_attempts": part_of("disaggregation_mode", "prefill before the hand-shake"),
}
