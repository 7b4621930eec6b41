"""Norms on a GPU: the fused kernels stay, where a row of theirs is proven not to see the others.

SGLang's deterministic mode replaces them by some eight eager kernels in every layer. Ours serve
where the fused ones fail the proof, which `gpu_mode.enable` runs at start-up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any

from sgl_det.patch import Patch
from sgl_det.patches.table import patches_of

# Norms whose fused kernel failed its proof, and which ours serves: (kind, width, dtype).
_UNPROVEN_NORMS: set[tuple[str, int, Any]] = set()
_NORMS = ("RMSNorm", "LayerNorm", "GemmaRMSNorm", "Gemma3RMSNorm", "Gemma4RMSNorm")


def _qk_norm(original):
    from sglang.srt.environ import envs

    @wraps(original)
    def apply_qk_norm(q, k, q_norm, k_norm, head_dim, *args, **kwargs):
        if ("qk", head_dim, q.dtype) in _UNPROVEN_NORMS:
            from sgl_det.kernels.rms_norm import rms_norm_heads

            heads = (x.view(len(x), -1, head_dim) for x in (q, k))
            rms_norm_heads(*heads, q_norm.weight, k_norm.weight, q_norm.variance_epsilon)
            return q, k
        # SGLang leaves the fused kernel in deterministic mode; it is proven at start-up.
        with envs.SGLANG_ENABLE_DETERMINISTIC_INFERENCE.override(False):
            return original(q, k, q_norm, k_norm, head_dim, *args, **kwargs)

    return apply_qk_norm


def _rms_norm(original):
    @wraps(original)
    def forward_cuda(self, x, residual=None, post_residual_addition=None):
        if ("rms", self.hidden_size, x.dtype) not in _UNPROVEN_NORMS:
            return original(self, x, residual, post_residual_addition)
        from sgl_det.kernels.rms_norm import fused_add_rms_norm, rms_norm

        weight, eps = self.weight.data, self.variance_epsilon
        if residual is None:
            return rms_norm(x, weight, eps)
        if post_residual_addition is not None:
            residual = residual + post_residual_addition
        fused_add_rms_norm(x, residual, weight, eps)
        return x, residual

    return forward_cuda


def row_checks(model: Any, dtype: Any) -> Iterator[tuple[str, Callable[[], str]]]:
    """A check for each kind of norm in the model."""
    from sglang.srt.layers import layernorm

    norms = tuple(getattr(layernorm, name) for name in _NORMS)
    checks: dict[str, Callable[[], str]] = {}
    for module in model.modules():
        if isinstance(module, norms):
            kind = f"{type(module).__name__} {_width(module)}"
            checks.setdefault(kind, partial(_check_norm, module, dtype))
        if all(hasattr(module, a) for a in ("q_norm", "k_norm", "q_size", "kv_size", "head_dim")):
            kind = f"qk_norm {module.q_size}+{module.kv_size}"
            checks.setdefault(kind, partial(_check_qk_norm, module, dtype))
    yield from checks.items()


def _width(norm: Any) -> int:
    weight = getattr(norm, "weight", None)
    return norm.hidden_size if weight is None else weight.shape[-1]


def _random_rows(width: int, dtype: Any, seed: int) -> Any:
    """More rows than any that are tried."""
    import torch

    from sgl_det.kernels.row_proof import ROWS

    source = torch.Generator("cuda").manual_seed(seed)
    made = torch.empty((ROWS[-1] + 1, width), dtype=dtype, device="cuda")
    return made.normal_(generator=source)


def _check_norm(norm: Any, dtype: Any) -> str:
    held = type(norm).__name__ == "RMSNorm" and not (
        norm.cast_x_before_out_mul or norm.variance_size_override is not None or norm.fp32_residual
    )
    kind, check = ("rms", _width(norm), dtype), partial(_mismatch_of_norm, norm, dtype)
    return _serving(f"{type(norm).__name__}", kind, held, check)


def _check_qk_norm(attention: Any, dtype: Any) -> str:
    norms = attention.q_norm, attention.k_norm
    held = all(type(norm).__name__ == "RMSNorm" for norm in norms)
    held = held and norms[0].variance_epsilon == norms[1].variance_epsilon
    kind, check = ("qk", attention.head_dim, dtype), partial(_mismatch_of_qk_norm, attention, dtype)
    return _serving("the norm of queries and keys", kind, held, check)


def _serving(name: str, kind: tuple[str, int, Any], held: bool, check: Callable[[], str]) -> str:
    """Which kernel serves: the fused one, or ours where it is ``held``.

    Raises RuntimeError where a row depends on the others in every one.
    """
    fused = found = check()
    if not fused:
        return "fused"
    if held:
        _UNPROVEN_NORMS.add(kind)
        found = check()
        if not found:
            return f"sgl_det, because a row of the fused one depends on the others: {fused}"
    raise RuntimeError(
        f"a row of {name} ({kind[1]} wide, {kind[2]}) depends on the others: {found}; expected "
        f"equal bits; serve another model, or report it"
    )


def _mismatch_of_norm(norm: Any, dtype: Any) -> str:
    from sgl_det.kernels.row_proof import first_mismatch

    x, residual = (_random_rows(_width(norm), dtype, seed) for seed in (0, 1))
    found = first_mismatch(lambda x: (norm.forward_cuda(x),), (x,))
    if not found and type(norm).__name__ in ("RMSNorm", "GemmaRMSNorm"):
        found = first_mismatch(norm.forward_cuda, (x, residual))
    return found


def _mismatch_of_qk_norm(attention: Any, dtype: Any) -> str:
    from sglang.srt.models import utils

    from sgl_det.kernels.row_proof import first_mismatch

    a = attention

    def run(qkv):
        q, k, _ = qkv.split([a.q_size, a.kv_size, a.kv_size], dim=-1)
        return utils.apply_qk_norm(q, k, a.q_norm, a.k_norm, a.head_dim)

    return first_mismatch(run, (_random_rows(a.q_size + 2 * a.kv_size, dtype, 0),))


_TABLE = (
    (
        "rms_norm",
        "sglang.srt.layers.layernorm:RMSNorm.forward_cuda",
        "2c6a52a8d2b1",
        "the fused norms serve where they are proven, our kernel elsewhere; eight eager ones never",
        _rms_norm,
        "none: SGLang replaces the fused norm by eager kernels",
    ),
    (
        "qk_norm",
        "sglang.srt.models.utils:apply_qk_norm",
        "e81d53440c54",
        "the fused norm of queries and keys serves in deterministic mode, after its proof",
        _qk_norm,
        "none: SGLang switches it off in deterministic mode",
    ),
)


def patches() -> tuple[Patch, ...]:
    """The patches of a scheduler process that runs on a GPU, whatever its attention backend."""
    return patches_of("norms", _TABLE)
