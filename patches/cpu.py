"""The torch_native backend on a CPU: every sum over K, D or the keys in one fixed order.

The layers call the kernels directly. What else reaches a matrix product of PyTorch (the output
projection among it) meets the same kernel through the dispatcher.
"""

from __future__ import annotations

from typing import Any

from sgl_det.patch import Patch
from sgl_det.patches.table import patches_of

_NATIVE = "sglang.srt.layers.attention.torch_native_backend:TorchNativeAttnBackend"
_NO_SEAM = "none: torch_native has no place for another kernel"


def _linear(original):
    from sgl_det.kernels.cpu import linear

    def apply(self, layer, x, bias=None):
        return linear(x, layer.weight, bias)

    return apply


def _linear_into(original):
    from sgl_det.kernels.cpu import linear

    def apply_into(self, layer, x, output, bias=None):
        return output.copy_(linear(x, layer.weight, bias, output.dtype))

    return apply_into


def _extend(original):
    def _run_sdpa_forward_extend(
        self,
        query,
        output,
        k_cache,
        v_cache,
        req_to_token,
        req_pool_indices,
        seq_lens,
        extend_prefix_lens,
        extend_seq_lens,
        encoder_lens=None,
        **options,
    ):
        _refuse(self, options.pop("causal", False) and encoder_lens is None, options)
        cache = (k_cache, v_cache, req_to_token, req_pool_indices, seq_lens)
        return _attend(query, output, *cache, extend_prefix_lens, options)

    return _run_sdpa_forward_extend


def _decode(original):
    def _run_sdpa_forward_decode(
        self,
        query,
        output,
        k_cache,
        v_cache,
        req_to_token,
        req_pool_indices,
        seq_lens,
        encoder_lens=None,
        **options,
    ):
        options.pop("causal", None)  # one query at the end of its keys: nothing to mask
        _refuse(self, encoder_lens is None, options)
        cache = (k_cache, v_cache, req_to_token, req_pool_indices, seq_lens)
        return _attend(query, output, *cache, None, options)

    return _run_sdpa_forward_decode


def _attend(query, output, *cache_and_prefix):
    from sgl_det.kernels.cpu import attention

    *cache, prefix, options = cache_and_prefix
    scale, window = options.get("scaling"), options.get("sliding_window_size")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    window = None if window is None or window < 0 else window
    return attention(query, output, *cache, prefix, scale=scale, window=window)


def _refuse(backend: Any, decoder_only: bool, options: dict[str, Any]) -> None:
    unknown = options.keys() - {"scaling", "enable_gqa", "is_cross_attn", "sliding_window_size"}
    if not decoder_only or options.get("is_cross_attn") or unknown:
        raise ValueError(
            f"the CPU attention kernel holds causal self-attention; found cross-attention, an "
            f"encoder, or options {sorted(unknown)}; serve a decoder-only model"
        )
    if backend.use_sliding_window_kv_pool:
        raise ValueError(
            "the CPU attention kernel reads one KV pool; found a second pool for sliding windows; "
            "start with --disable-hybrid-swa-memory"
        )


def _rms_norm(original):
    from sgl_det.kernels.cpu import rms_norm

    def forward_native(self, x, residual=None, post_residual_addition=None):
        if x.shape[-1] != self.hidden_size:
            raise ValueError(f"hidden_size is {x.shape[-1]}, expected {self.hidden_size}")
        dtype = self.override_orig_dtype or x.dtype
        return rms_norm(
            x,
            self.weight,
            self.variance_epsilon,
            residual,
            extra=post_residual_addition,
            var_size=self.variance_size_override,
            cast_first=self.cast_x_before_out_mul,
            out_dtype=dtype,
            residual_dtype=_float32() if self.fp32_residual else dtype,
        )

    return forward_native


def _float32():
    import torch

    return torch.float32


def _silu_and_mul(original):
    from sgl_det.kernels.cpu import silu_and_mul

    def forward_native(self, x):
        return silu_and_mul(x)

    return forward_native


def _rotary(original):
    from sglang.srt.layers.rotary_embedding.utils import apply_rotary_emb

    from sgl_det.kernels.cpu import rotary

    def forward_native(self, positions, query, key, offsets=None, fused_set_kv_buffer_arg=None):
        # Equal bits on both ways; the kernel is one pass instead of some twenty.
        plain = self._apply_rotary_emb_wrapped is apply_rotary_emb
        if offsets is not None or not plain or hasattr(self, "sin_cos_cache"):
            return original(self, positions, query, key, offsets, fused_set_kv_buffer_arg)
        table, head, neox = self.cos_sin_cache, self.head_size, self.is_neox_style
        q = rotary(query, positions, table, head, neox)
        return q, rotary(key, positions, table, head, neox)

    return forward_native


def _aten(original):
    library = None

    def enable_batch_invariant_mode(enable_bmm=True):
        nonlocal library
        if library is None:
            from sgl_det.kernels import cpu_aten

            library = cpu_aten.override()

    return enable_batch_invariant_mode


def _self_test(original):
    def maybe_enable_batch_invariant_mode(self):
        from sgl_det.kernels import canary, cpu_canary, cpu_self_test, proof

        original(self)
        weights, heads = cpu_self_test.shapes_of(self.model), heads_of(self)
        with proof.timed():
            proof.PROVEN["cpu"] = cpu_self_test.self_test(
                weights, heads, self.model_config.vocab_size
            )
        canary.watch(cpu_canary.cases(weights, heads))

    def heads_of(runner):
        config, tp = runner.model_config, runner.ps.tp_size
        groups = config.get_num_kv_heads(tp)
        heads = config.num_attention_heads // tp
        return heads, groups, config.head_dim, config.v_head_dim, runner.dtype

    return maybe_enable_batch_invariant_mode


_INVARIANT = "sglang.srt.batch_invariant_ops.batch_invariant_ops:enable_batch_invariant_mode"
_UNQUANT = "sglang.srt.layers.quantization.unquant:UnquantizedLinearMethod"
_RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner"
_ROTARY = "sglang.srt.layers.rotary_embedding.base:RotaryEmbedding"

# name, target, fingerprint, why, wrap, upstream
_TABLE = (
    (
        "linear",
        f"{_UNQUANT}.apply",
        "be591cb1fb4c",
        "every linear layer adds over K in ascending order, whatever the number of rows",
        _linear,
        _NO_SEAM,
    ),
    (
        "linear_into",
        f"{_UNQUANT}.apply_into",
        "c48d02395a20",
        "the same for layers that write into a given buffer",
        _linear_into,
        _NO_SEAM,
    ),
    (
        "matmul",
        _INVARIANT,
        "369b1321cc6f",
        "mm, addmm and bmm of anything else (the output projection) get the same order",
        _aten,
        "none: the batch-invariant mode knows no CPU",
    ),
    (
        "attention.extend",
        f"{_NATIVE}._run_sdpa_forward_extend",
        "a502fec18629",
        "KV tiles of 64 keys at absolute positions, read in place; chunks leave no trace",
        _extend,
        _NO_SEAM,
    ),
    (
        "attention.decode",
        f"{_NATIVE}._run_sdpa_forward_decode",
        "0bbe3227a1df",
        "the order of prefill, so that prefill and decode agree bit for bit",
        _decode,
        _NO_SEAM,
    ),
    (
        "rms_norm",
        "sglang.srt.layers.layernorm:RMSNorm.forward_native",
        "97c5456737dc",
        "the mean of squares in an order that the hidden size alone decides",
        _rms_norm,
        _NO_SEAM,
    ),
    (
        "silu_and_mul",
        "sglang.srt.layers.activation:SiluAndMul.forward_native",
        "f49be663b3d9",
        "PyTorch's fp32 sigmoid depends on the place in the buffer",
        _silu_and_mul,
        _NO_SEAM,
    ),
    (
        "rotary",
        f"{_ROTARY}.forward_native",
        "94d9e521a4e0",
        "one pass instead of some twenty, with equal bits; no order is changed",
        _rotary,
        _NO_SEAM,
    ),
    (
        "self_test",
        f"{_RUNNER}.maybe_enable_batch_invariant_mode",
        "2d039059b531",
        "the loaded shapes are proven on this processor before anything is served",
        _self_test,
        "none: SGLang does not test its kernels at start-up",
    ),
)


def patches() -> tuple[Patch, ...]:
    """The patches of a scheduler process that runs on a CPU."""
    return patches_of("cpu", _TABLE)
