"""Arguments of speculative decoding."""

from __future__ import annotations

from sgl_det.arguments import part_of, refused

_SPEC = "speculative_algorithm"
_DSPARK = "a setting of the DSPARK algorithm"
_NGRAM = "a setting of the NGRAM algorithm"

SPECULATIVE = {
    _SPEC: refused(
        "verification runs several positions at once in other tiles than decode, and its noise "
        "follows where the window starts"
    ),
    "speculative_draft_model_path": part_of(_SPEC, "the draft model"),
    "speculative_draft_model_revision": part_of(_SPEC, "the draft model's version"),
    "decrypted_draft_config_file": part_of(_SPEC, "the draft model's config"),
    "speculative_draft_load_format": part_of(_SPEC, "how draft weights are read"),
    "speculative_draft_model_quantization": part_of(_SPEC, "how draft weights are quantised"),
    "speculative_draft_attention_backend": part_of(_SPEC, "the draft's attention"),
    "speculative_draft_window_size": part_of(_SPEC, "the draft's window"),
    "speculative_num_steps": part_of(_SPEC, "how many drafts per step"),
    "speculative_eagle_topk": part_of(_SPEC, "how many branches per draft"),
    "speculative_num_draft_tokens": part_of(_SPEC, "how many drafted tokens to verify"),
    "speculative_dflash_block_size": part_of(_SPEC, "a setting of the DFLASH algorithm"),
    "speculative_dspark_block_size": part_of(_SPEC, _DSPARK),
    "speculative_dspark_sps_table_path": part_of(_SPEC, _DSPARK),
    "speculative_dspark_confidence_sts_path": part_of(_SPEC, _DSPARK),
    "speculative_dspark_align_verify_tokens_to_graph_tier": part_of(_SPEC, _DSPARK),
    "speculative_accept_threshold_single": part_of(_SPEC, "which drafts are accepted"),
    "speculative_accept_threshold_acc": part_of(_SPEC, "which drafts are accepted"),
    "speculative_use_rejection_sampling": part_of(_SPEC, "which drafts are accepted"),
    "speculative_token_map": part_of(_SPEC, "the draft's vocabulary"),
    "speculative_attention_mode": part_of(_SPEC, "the kernel of verification"),
    "speculative_moe_runner_backend": part_of(_SPEC, "the draft's expert kernel"),
    "speculative_moe_a2a_backend": part_of(_SPEC, "how the draft's experts exchange tokens"),
    "speculative_skip_dp_mlp_sync": part_of(_SPEC, "when replicas wait for each other"),
    "enable_multi_layer_eagle": part_of(_SPEC, "a variant of EAGLE"),
    "speculative_adaptive": part_of(_SPEC, "whether the number of drafts follows acceptance"),
    "speculative_adaptive_config": part_of(_SPEC, "how the number of drafts follows acceptance"),
    "decoupled_spec_role": refused("draft and target then run on two servers, not reviewed"),
    "decoupled_spec_bind_endpoint": part_of("decoupled_spec_role", "where this server listens"),
    "decoupled_spec_connect_endpoints": part_of("decoupled_spec_role", "where the others listen"),
    "decoupled_spec_rank": part_of("decoupled_spec_role", "which server this is"),
    "spec_trace_dir": part_of("decoupled_spec_role", "where traces are written"),
    "speculative_ngram_min_bfs_breadth": part_of(_SPEC, _NGRAM),
    "speculative_ngram_max_bfs_breadth": part_of(_SPEC, _NGRAM),
    "speculative_ngram_match_type": part_of(_SPEC, _NGRAM),
    "speculative_ngram_max_trie_depth": part_of(_SPEC, _NGRAM),
    "speculative_ngram_capacity": part_of(_SPEC, _NGRAM),
    "speculative_ngram_external_corpus_path": part_of(_SPEC, _NGRAM),
    "speculative_ngram_external_sam_budget": part_of(_SPEC, _NGRAM),
    "speculative_ngram_external_corpus_max_tokens": part_of(_SPEC, _NGRAM),
}
