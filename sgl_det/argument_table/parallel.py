"""Arguments that spread one model over several GPUs or machines."""

from __future__ import annotations

from sgl_det.arguments import neutral, part_of, refused

_TP = "tp_size"
_ALL_REDUCE = "how partial sums travel between GPUs"
_UNSAFE = "it changes how GPUs share memory, and one GPU has no use for it"

PARALLEL = {
    "tp_size": refused(
        "sums over GPUs are added in an order that follows the message size, and K is cut by rank"
    ),
    "pp_size": refused("stages exchange micro-batches along a path that has not been reviewed"),
    "dp_size": refused(
        "the process that starts the replicas loads no plugin, and a request may reach any replica"
    ),
    "ep_size": refused("experts on several GPUs exchange tokens in kernels chosen by phase"),
    "dcp_size": refused(
        "splitting the keys of a decode over GPUs makes the order follow their number"
    ),
    "attn_cp_size": refused("splitting a prompt over GPUs makes the order follow their number"),
    "moe_dp_size": refused("experts on several GPUs exchange tokens in kernels chosen by phase"),
    "dwdp_size": refused("weights travel between GPUs along a path that has not been reviewed"),
    "nnodes": refused("workers on other machines start outside the launcher, without our patches"),
    "node_rank": part_of("nnodes", "which machine this is"),
    "use_ray": refused("Ray's actors load no plugin, so no patch holds in them", liftable=False),
    # Set-up of the process group.
    "nccl_port": neutral("where the processes of the model meet"),
    "dist_timeout": neutral("how long the processes of the model wait for each other"),
    "dist_init_addr": neutral("where the processes of the model meet"),
    "base_gpu_id": neutral("which GPU; its kind is part of the numerics key"),
    "gpu_id_step": neutral("which GPUs; their kind is part of the numerics key"),
    # Read only with more than one GPU.
    "enable_dp_attention": refused("it sums over ranks by reduce-scatter, in an order not fixed"),
    "enable_dp_attention_local_control_broadcast": part_of("enable_dp_attention", "control paths"),
    "enable_dp_lm_head": part_of("enable_dp_attention", "how the vocabulary is divided"),
    "load_balance_method": part_of("dp_size", "which replica takes a request"),
    "pp_max_micro_batch_size": part_of("pp_size", "the size of micro-batches"),
    "pp_async_batch_depth": part_of("pp_size", "how many micro-batches are under way"),
    "dcp_comm_backend": part_of("dcp_size", "how partial attention travels between GPUs"),
    "dcp_replicate_q_proj": part_of("dcp_size", "which GPU computes the queries"),
    "enable_prefill_cp": refused(
        "splitting a prompt over GPUs makes the order follow their number"
    ),
    "enable_prefill_context_parallel": refused("an older name of enable_prefill_cp"),
    "enable_dsa_prefill_context_parallel": refused("an older name of enable_prefill_cp"),
    "cp_strategy": part_of("enable_prefill_cp", "how a prompt is divided"),
    "prefill_cp_mode": part_of("enable_prefill_cp", "how a prompt is divided"),
    "dsa_prefill_cp_mode": part_of("enable_prefill_cp", "how a prompt is divided"),
    "enable_dsa_cache_layer_split": part_of("attn_cp_size", "how cached layers are divided"),
    "enable_cp_decode_attn_tp": part_of("attn_cp_size", "how attention weights are divided"),
    "enable_attn_tp_input_scattered": part_of(_TP, "how the input of attention is divided"),
    "disable_attn_tp_gather": part_of(_TP, "how the input of attention is padded"),
    "moe_dense_tp_size": part_of(_TP, "how dense layers of MoE models are divided"),
    "enable_p2p_check": part_of(_TP, "whether GPUs can reach each other"),
    "disable_custom_all_reduce": part_of(_TP, _ALL_REDUCE),
    "enable_mscclpp": part_of(_TP, _ALL_REDUCE),
    "enable_quant_communications": part_of(_TP, _ALL_REDUCE),
    "enable_flashinfer_allreduce_fusion": part_of(_TP, _ALL_REDUCE),
    "enforce_disable_flashinfer_allreduce_fusion": part_of(_TP, _ALL_REDUCE),
    "flashinfer_allreduce_fusion_backend": part_of(_TP, _ALL_REDUCE),
    "enable_aiter_allreduce_fusion": part_of(_TP, _ALL_REDUCE),
    "enable_scattered_sconv": part_of(_TP, "where a convolution's all-reduce is divided"),
    "pre_warm_nccl": part_of(_TP, "whether the first all-reduce happens at start-up"),
    "enable_nccl_nvls": refused(_UNSAFE),
    "enable_symm_mem": refused(_UNSAFE),
    "enable_torch_symm_mem": refused(_UNSAFE),
}
