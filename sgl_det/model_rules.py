"""Which models are held, judged on SGLang's ``ModelConfig`` and the backend's limits.

A model is held when its class was read and reaches only operators whose order is fixed: linear
layers, RMSNorm, rotary embeddings, attention, SiLU and the output projection. Everything else is
refused under the name of the kind of layer that is not covered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sgl_det.arguments import Context
from sgl_det.axis import Axis

REVIEWED = frozenset(
    {
        "Gemma2ForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
    }
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_RECURRENT = ("mamba", "mamba2", "linear_attention", "recurrent", "conv", "gdn", "kda")
_RECURRENT_FIELDS = ("mamba_d_state", "linear_num_value_heads", "hybrid_override_pattern")
# Computed once per position, from a table that is filled when the model is loaded.
_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "dynamic"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRule:
    """A kind of model or of setting that may not be held.

    name      of the refusal
    find      what was found and expected, in a clause, or None when nothing is wrong
    reason    why that is not held, in a clause
    way_out   what to do instead
    drops     axes lost when lifted; None means all of them
    liftable  False where the server would end or hang
    """

    name: str
    find: Callable[[Context], str | None]
    reason: str
    way_out: str = "serve a dense decoder such as Qwen3 or Llama"
    drops: tuple[Axis, ...] | None = None
    liftable: bool = True


def judge_model(context: Context) -> Iterator[tuple[ModelRule, str]]:
    """The rules that the served model meets, each with what was found."""
    met = [(rule, found) for rule in MODEL_RULES if (found := rule.find(context)) is not None]
    kinds = {rule.name for rule, _ in met} & _KINDS
    yield from ((rule, found) for rule, found in met if rule.name != "architecture" or not kinds)


def _architecture(context: Context) -> str | None:
    names = list(context.model_config.hf_config.architectures or ["none"])
    if len(names) == 1 and names[0] in REVIEWED:
        return None
    return f"the architecture is {', '.join(names)}, expected one of {', '.join(sorted(REVIEWED))}"


def _text(context: Context) -> Any:
    return context.model_config.hf_text_config


def _mixture_of_experts(context: Context) -> str | None:
    for field in _EXPERTS:
        number = getattr(_text(context), field, None)
        if isinstance(number, int) and number > 1:
            return f"the model has {number} experts per layer ({field}), expected none"
    return None


def _hybrid_attention(context: Context) -> str | None:
    config = _text(context)
    kinds = set(getattr(config, "layer_types", None) or ()) & set(_RECURRENT)
    fields = {f for f in _RECURRENT_FIELDS if getattr(config, f, None)}
    if not kinds | fields:
        return None
    return f"the model has recurrent layers ({', '.join(sorted(kinds | fields))}), expected none"


def _multimodal(context: Context) -> str | None:
    if context.model_config.is_multimodal:
        return "the model takes images, audio or video, expected text alone"
    return None


def _embedding(context: Context) -> str | None:
    if context.model_config.is_generation or context.server_args.is_embedding:
        return None
    return "the model embeds, ranks or classifies, expected one that generates text"


def _mla(context: Context) -> str | None:
    if context.model_config.attention_arch.name == "MHA":
        return None
    kind = context.model_config.attention_arch.name
    return f"the model's attention is {kind}, expected keys and values per head"


def _quantization(context: Context) -> str | None:
    config = context.model_config
    for source in (config.hf_config, _text(context)):
        for field in ("quantization_config", "compression_config"):
            settings = getattr(source, field, None)
            if settings:
                named = settings.get("quant_method") if isinstance(settings, Mapping) else None
                return f"the checkpoint is quantised ({named or field}), expected plain weights"
    if config.quantization is not None and context.server_args.quantization is None:
        return f"the checkpoint is quantised ({config.quantization}), expected plain weights"
    return None


def _model_dtype(context: Context) -> str | None:
    dtype = str(context.model_config.dtype).removeprefix("torch.")
    if dtype in context.limits.dtypes:
        return None
    held = ", ".join(sorted(context.limits.dtypes))
    return f"the model's dtype is {dtype}, expected one of {held} with {context.limits.name}"


def _head_dim(context: Context) -> str | None:
    config, held = context.model_config, context.limits.head_dims
    if config.head_dim != config.v_head_dim:
        return f"heads of keys and values have {config.head_dim} and {config.v_head_dim} elements"
    if held is None or config.head_dim in held:
        return None
    sizes = ", ".join(map(str, sorted(held)))
    return f"the head size is {config.head_dim}, expected one of {sizes} with {context.limits.name}"


def _sliding_window(context: Context) -> str | None:
    config = context.model_config
    kinds = set(getattr(_text(context), "layer_types", None) or ())
    size = config.sliding_window_size or config.attention_chunk_size
    windowed = size is not None or kinds & {"sliding_attention", "chunked_attention"}
    if not windowed or context.limits.windows:
        return None
    return f"the model has an attention window ({size}), expected none with {context.limits.name}"


def _logit_softcap(context: Context) -> str | None:
    if getattr(_text(context), "attn_logit_softcapping", None) and not context.limits.caps:
        return f"attention's logits are capped, expected none with {context.limits.name}"
    return None


def _attention_sinks(context: Context) -> str | None:
    return "the model has attention sinks" if context.model_config.has_attention_sinks else None


def _rope(context: Context) -> str | None:
    config = _text(context)
    if getattr(config, "dual_chunk_attention_config", None):
        return "the model has dual chunk attention, expected one rotary table"
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [v for v in given.values() if isinstance(v, Mapping)]
    for settings in nested or [given]:
        kind = settings.get("rope_type", settings.get("type", "default"))
        odd = [f for f in ("mrope_section", "use_fope") if settings.get(f)]
        if kind not in _ROPE_TYPES or odd:
            expected = ", ".join(sorted(_ROPE_TYPES))
            return f"the rotary embedding is {odd[0] if odd else kind}, expected one of {expected}"
    return None


MODEL_RULES = (
    ModelRule(
        name="mixture_of_experts",
        find=_mixture_of_experts,
        reason="the expert kernels choose their tile by the number of tokens",
    ),
    ModelRule(
        name="hybrid_attention",
        find=_hybrid_attention,
        reason="a recurrent state follows where a prompt was cut, and decode updates it otherwise",
    ),
    ModelRule(
        name="multimodal",
        find=_multimodal,
        reason="vision and audio towers use kernels that batch inputs, not reviewed",
    ),
    ModelRule(
        name="embedding", find=_embedding, reason="pooling over the sequence has not been reviewed"
    ),
    ModelRule(
        name="mla",
        find=_mla,
        reason="latent attention takes another kernel in prefill than in decode",
    ),
    ModelRule(
        name="architecture",
        find=_architecture,
        reason="the code of other models has not been read for operators whose order is not fixed",
    ),
    ModelRule(
        name="quantization",
        find=_quantization,
        reason="quantised matrix products choose their kernel and tile by the number of rows",
        way_out="serve the unquantised weights",
    ),
    ModelRule(
        name="model_dtype",
        find=_model_dtype,
        reason="kernels of other dtypes have not been reviewed",
        way_out="use --dtype bfloat16",
    ),
    ModelRule(
        name="head_dim",
        find=_head_dim,
        reason="for other sizes the kernel's tile has not been shown to be free of the batch",
        way_out="choose another --attention-backend",
        liftable=False,
    ),
    ModelRule(
        name="sliding_window",
        find=_sliding_window,
        reason="tiles start at the window and not at fixed positions",
        way_out="use --attention-backend triton",
        liftable=False,
    ),
    ModelRule(
        name="logit_softcap",
        find=_logit_softcap,
        reason="the capped kernels were not reviewed",
        way_out="use --attention-backend triton",
        liftable=False,
    ),
    ModelRule(
        name="attention_sinks",
        find=_attention_sinks,
        reason="kernels with sinks have not been reviewed",
    ),
    ModelRule(
        name="rope",
        find=_rope,
        reason="long-context tables are chosen by the longest position in the batch, and others "
        "were not reviewed",
    ),
)
_KINDS = frozenset({"mixture_of_experts", "hybrid_attention", "multimodal", "embedding", "mla"})
