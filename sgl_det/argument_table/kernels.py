"""Arguments that choose kernels, CUDA graphs and the precision of the computation."""

from __future__ import annotations

from typing import Any

from sgl_det.arguments import Context, claimed, neutral, one_of, part_of, refused
from sgl_det.axis import Axis

_GRAPHS = {"decode": ("full", "disabled"), "prefill": ("breakable", "disabled")}
_FOLDED = "is folded into cuda_graph_config, which is judged"
_SIZES = "which batch sizes are captured; a row's bits do not depend on its batch"
_NOT_IN_KEY = "it changes the bits, and the numerics key does not record it"


def _graphs_reviewed(value: Any, context: Context) -> bool:
    return value is None or all(
        getattr(value, phase).backend in backends for phase, backends in _GRAPHS.items()
    )


def _same_in_both_phases(value: Any, context: Context) -> bool:
    return value is None or value == context.server_args.attention_backend


def _is_the_judged_backend(value: Any, context: Context) -> bool:
    return value == context.limits.name


def _no_cutedsl(value: Any, context: Context) -> bool:
    if value == "auto" and context.server_args.device == "cuda":
        from sglang.srt.utils import is_sm100_supported

        return not is_sm100_supported()
    return value in ("auto", "torch")


_TWO_KERNELS = refused(
    "two attention backends in one server compute the same position in two orders, and SGLang "
    "checks only one of them",
    _same_in_both_phases,
    "the same backend as --attention-backend",
)

KERNELS = {
    "device": refused(
        "kernels of other devices have not been reviewed",
        one_of("cuda", "cpu"),
        "'cuda' or 'cpu'",
        liftable=False,
    ),
    "enable_deterministic_inference": claimed(
        "our patches build on SGLang's deterministic mode",
        one_of(True),
        "True",
        way_out="leave it to the launcher",
        liftable=False,
    ),
    "rl_on_policy_target": refused(
        "it replaces norms, activations and rotary embeddings by other code, not reviewed"
    ),
    "attention_backend": claimed(
        "the backend whose limits and claims are judged",
        _is_the_judged_backend,
        "a backend of ours",
        liftable=False,
    ),
    "prefill_attention_backend": _TWO_KERNELS,
    "decode_attention_backend": _TWO_KERNELS,
    "sampling_backend": refused(
        "other samplers draw from one generator for the whole batch",
        one_of("pytorch"),
        "'pytorch'",
        drops=(Axis.SAMPLED,),
    ),
    "bf16_gemm_backend": refused(
        "the cutedsl kernels, which 'auto' takes on Blackwell, are chosen by the number of rows",
        _no_cutedsl,
        "'torch', which our launcher sets, or 'auto' before Blackwell",
    ),
    "fp8_gemm_runner_backend": part_of("quantization", "the kernel of FP8 products"),
    "fp4_gemm_runner_backend": part_of("quantization", "the kernel of FP4 products"),
    "dsa_prefill_backend": part_of("mla", "the kernel of sparse latent attention"),
    "dsa_decode_backend": part_of("mla", "the kernel of sparse latent attention"),
    "dsa_paged_mqa_logits_backend": part_of("mla", "the indexer of sparse latent attention"),
    "dsa_topk_backend": part_of("mla", "the indexer's selection of keys"),
    "flashinfer_mla_disable_ragged": part_of("mla", "a variant of latent attention"),
    "enable_deepseek_v4_fp4_indexer": part_of("mla", "the indexer of sparse latent attention"),
    "disable_flashinfer_autotune": part_of(
        "mixture_of_experts", "timing of FlashInfer's expert kernels"
    ),
    "flashinfer_autotune_skip_ops": part_of(
        "mixture_of_experts", "timing of FlashInfer's expert kernels"
    ),
    "triton_attention_reduce_in_fp32": refused(_NOT_IN_KEY),
    "triton_attention_num_kv_splits": neutral("deterministic mode splits by size, not by number"),
    "triton_attention_split_tile_size": neutral("deterministic mode takes a fixed size instead"),
    "enable_fused_qk_norm_rope": part_of("mixture_of_experts", "a fused kernel of MoE models"),
    "enable_precise_embedding_interpolation": part_of("multimodal", "how images are resized"),
    # Precision.
    "enable_fp32_lm_head": refused(_NOT_IN_KEY),
    "enable_tf32_matmul": refused(_NOT_IN_KEY),
    # CUDA graphs.
    "cuda_graph_config": refused(
        "other graph backends compile the model, or plan the attention of a prefill only once",
        _graphs_reviewed,
        "decode full or disabled, prefill breakable or disabled",
        way_out="leave out the --cuda-graph flags",
    ),
    "cuda_graph_backend_decode": neutral(_FOLDED),
    "cuda_graph_backend_prefill": neutral(_FOLDED),
    "cuda_graph_tc_compiler": neutral(_FOLDED),
    "disable_prefill_cuda_graph": neutral(_FOLDED),
    "disable_decode_cuda_graph": neutral(_FOLDED),
    "disable_cuda_graph": neutral(_FOLDED),
    "cuda_graph_max_bs_decode": claimed(_SIZES),
    "cuda_graph_max_bs_prefill": claimed(_SIZES),
    "cuda_graph_bs_decode": claimed(_SIZES),
    "cuda_graph_bs_prefill": claimed(_SIZES),
    "disable_cuda_graph_padding": claimed(_SIZES),
    "enable_profile_cuda_graph": neutral("profiles the capture"),
    "enable_cudagraph_gc": neutral("whether Python collects garbage during capture"),
    "debug_cuda_graph": refused(
        "it runs each operator eagerly inside the graph runner", drops=(Axis.CUDA_GRAPH,)
    ),
    # Compilers.
    "enable_torch_compile": refused(
        "batches up to a size run compiled and larger ones do not, so the kernels follow the batch"
    ),
    "enable_torch_compile_debug_mode": part_of("enable_torch_compile", "logs of the compiler"),
    "torch_compile_max_bs": part_of("enable_torch_compile", "up to which batch to compile"),
    "torchao_config": refused("torchao replaces the weights by quantised ones"),
    # What a request may ask of the forward pass.
    "enable_return_hidden_states": refused(
        "one request for hidden states changes what is captured for the whole batch"
    ),
    "return_hidden_states_mode": part_of("enable_return_hidden_states", "which states to return"),
    "enable_mis": refused("scoring several items at once attends through a mask of its own"),
    "enable_custom_logit_processor": claimed(
        "code sent by a request edits its own row alone, once a token, and knows all before"
    ),
}
