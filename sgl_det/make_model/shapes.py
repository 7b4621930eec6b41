"""Configs of made-up models: named shapes, configs read from disk, the tensors they call for.

Named shapes are dense decoders in Hugging Face's own fields. ``demo``, its kin and ``cpu-mid`` are
ours, for a CPU; the others have the published sizes of the models that they are named after.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from sgl_det.make_model import tokenizer
from sgl_det.make_model.weights import Parameter

# Every projection sends a row of unit mean square to one of this standard deviation, whatever its
# width: gates and scores are then far from linear, and logits far from uniform.
GAIN = 2.0
# Two things make greedy text sensitive to single bits. Query and key norms multiply into the
# attention scores: the sharper attention is, the more a rounding moves. And if each layer writes
# louder than the one before, the residual stream does not damp what the layer amplified. A config
# sets its own under the key FIELD; these are for configs without one.
FIELD = "sgl_det"
DEFAULTS = {"qk_norm": 2.0, "layer_growth": 1.0}
NORM_SPREAD = 0.1
BIAS_STD = 0.5

FAMILIES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
}


def _shape(family: str, **sizes: Any) -> dict[str, Any]:
    common = {
        "architectures": [FAMILIES[family]],
        "model_type": family,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "tie_word_embeddings": False,
    }
    return common | sizes


def _qwen3(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **other: Any) -> dict:
    sizes = {
        "attention_bias": False,
        "head_dim": 128,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "max_position_embeddings": 40960,
        "max_window_layers": layers,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    return _shape("qwen3", **(sizes | other))


def _qwen2(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **other: Any) -> dict:
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "max_position_embeddings": 32768,
        "max_window_layers": layers,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
    }
    return _shape("qwen2", **(sizes | other))


def _llama(
    hidden: int, inner: int, layers: int, head_dim: int, factor: float, **other: Any
) -> dict:
    sizes = {
        "attention_bias": False,
        "head_dim": head_dim,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": factor,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "vocab_size": 128256,
    }
    return _shape("llama", **(sizes | other))


def _gemma2(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **other: Any) -> dict:
    sizes = {
        "attention_bias": False,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "max_position_embeddings": 8192,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "vocab_size": 256000,
    }
    return _shape("gemma2", **(sizes | other))


_MISTRAL_7B = {
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "vocab_size": 32768,
}

# One rounding grows by 1e5 to 1e6 through the demo's eight layers, so that greedy text diverges
# within tens of tokens in fp32 too. On a CPU that matters: there stock SGLang's bf16 and fp16
# linear layers may happen to be batch-invariant, its fp32 ones are not.
_SENSITIVE = {"qk_norm": 6.0, "layer_growth": 2.0}

SHAPES: dict[str, dict[str, Any]] = {
    "demo": _qwen3(256, 1024, 8, 4, 2, head_dim=64, vocab_size=320, **{FIELD: _SENSITIVE}),
    "demo-llama": _llama(
        256, 1024, 6, 64, 8.0, num_attention_heads=8, num_key_value_heads=2, vocab_size=320
    ),
    "demo-qwen2": _qwen2(896, 2432, 4, 14, 2, vocab_size=320),
    "demo-gemma2": _gemma2(512, 1024, 4, 4, 2, sliding_window=96, vocab_size=320),
    "cpu-mid": _qwen3(1024, 3072, 4, 16, 8, vocab_size=320),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, 8, tie_word_embeddings=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, 8, tie_word_embeddings=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, 8, tie_word_embeddings=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, 8),
    "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14, 2, vocab_size=151936, tie_word_embeddings=True),
    "qwen2.5-7b": _qwen2(3584, 18944, 28, 28, 4, vocab_size=152064),
    "llama-3.2-1b": _llama(2048, 8192, 16, 64, 32.0, tie_word_embeddings=True),
    "llama-3.1-8b": _llama(4096, 14336, 32, 128, 8.0),
    "gemma-2-2b": _gemma2(2304, 9216, 26, 8, 4),
    "mistral-7b": _shape("mistral", **_MISTRAL_7B),
}


def load_config(config_or_name: str | Path) -> tuple[str, dict[str, Any]]:
    """(name, config) of a named shape, a ``config.json`` or a folder that holds one.

    The token ids in it are those of the byte tokenizer. Raises ValueError for what is none of
    these, and for a config whose tensors are not known here.
    """
    name = str(config_or_name)
    if name in SHAPES:
        config = dict(SHAPES[name])
    else:
        path = Path(config_or_name)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise ValueError(
                f"{name!r} is neither a config.json, nor a folder with one, nor a named shape "
                f"({', '.join(SHAPES)})"
            )
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as e:
            raise ValueError(f"{path} is not JSON: {e}") from e
        name = path.resolve().parent.name
    _check(name, config)
    config["bos_token_id"] = config["eos_token_id"] = tokenizer.EOS
    config["pad_token_id"] = tokenizer.PAD
    return name, config


def _check(name: str, config: Any) -> None:
    family = config.get("model_type") if isinstance(config, dict) else None
    if family not in FAMILIES:
        raise ValueError(
            f"{name}: model_type is {family!r}; made-up weights exist for {', '.join(FAMILIES)}"
        )
    if config.get("quantization_config"):
        raise ValueError(f"{name}: a quantised config; remove quantization_config to make a model")
    smallest = {
        "hidden_size": 1,
        "intermediate_size": 1,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": tokenizer.SMALLEST_VOCAB,
    }
    for field, least in smallest.items():
        found = config.get(field)
        if not isinstance(found, int) or found < least:
            raise ValueError(f"{name}: {field} is {found!r}; it must be an integer >= {least}")
    unknown = set(config.get(FIELD) or {}) - set(DEFAULTS)
    if unknown:
        raise ValueError(f"{name}: {FIELD} has {sorted(unknown)}; known are {list(DEFAULTS)}")


def parameters(config: dict[str, Any]) -> list[Parameter]:
    """The checkpoint's tensors, in the order in which they are stored."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    quiet = tuple(tokenizer.quiet_ids())
    tied = config.get("tie_word_embeddings", False)
    sensitivity = DEFAULTS | (config.get(FIELD) or {})
    found = [_matrix("model.embed_tokens", vocab, hidden, quiet if tied else ())]
    for i in range(config["num_hidden_layers"]):
        found += _layer(i, config, sensitivity)
    found.append(_norm("model.norm", hidden, _norm_mean(config)))
    if not tied:
        found.append(_matrix("lm_head", vocab, hidden, quiet))
    return found


def _layer(index: int, config: dict[str, Any], sensitivity: dict[str, float]) -> list[Parameter]:
    family, hidden, inner = config["model_type"], config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    prefix = f"model.layers.{index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    out_bias = family in ("qwen3", "llama") and bool(config.get("attention_bias"))
    qkv_bias = out_bias or family == "qwen2"
    mlp_bias = family == "llama" and bool(config.get("mlp_bias"))
    loud = sensitivity["layer_growth"] ** index
    projections = (
        (f"{attention}.q_proj", heads * head_dim, hidden, 1.0, qkv_bias),
        (f"{attention}.k_proj", kv_heads * head_dim, hidden, 1.0, qkv_bias),
        (f"{attention}.v_proj", kv_heads * head_dim, hidden, 1.0, qkv_bias),
        (f"{attention}.o_proj", hidden, heads * head_dim, loud, out_bias),
        (f"{mlp}.gate_proj", inner, hidden, 1.0, mlp_bias),
        (f"{mlp}.up_proj", inner, hidden, 1.0, mlp_bias),
        (f"{mlp}.down_proj", hidden, inner, loud, mlp_bias),
    )
    mean = _norm_mean(config)
    found = [_norm(f"{prefix}.input_layernorm", hidden, mean)]
    for name, rows, cols, gain, bias in projections:
        found.append(_matrix(name, rows, cols, gain=gain))
        if bias:
            found.append(Parameter(name=f"{name}.bias", shape=(rows,), mean=0.0, std=BIAS_STD))
    if family == "qwen3":
        found += [_norm(f"{attention}.{n}_norm", head_dim, sensitivity["qk_norm"]) for n in "qk"]
    if family == "gemma2":
        feedforward = (f"{prefix}.{x}_feedforward_layernorm" for x in ("pre", "post"))
        found += [_norm(name, hidden, mean) for name in feedforward]
    return [*found, _norm(f"{prefix}.post_attention_layernorm", hidden, mean)]


def _norm_mean(config: dict[str, Any]) -> float:
    """Gemma multiplies by one more than its weights."""
    return 0.0 if config["model_type"] == "gemma2" else 1.0


def _matrix(
    name: str, rows: int, cols: int, quiet: tuple[int, ...] = (), gain: float = 1.0
) -> Parameter:
    std = gain * GAIN / math.sqrt(cols)
    return Parameter(name=f"{name}.weight", shape=(rows, cols), mean=0.0, std=std, quiet=quiet)


def _norm(name: str, size: int, mean: float = 1.0) -> Parameter:
    std = NORM_SPREAD * (mean or 1.0)
    return Parameter(name=f"{name}.weight", shape=(size,), mean=mean, std=std)
