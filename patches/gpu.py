"""A model on a GPU: linear layers and norms in one order, each by the fastest proven kernel.

SGLang's batch-invariant mode stays off: ours is installed where SGLang would switch it on. So the
fused norms stay, and are proven instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any

from sgl_det.patch import Patch

_REQUIRES = "sglang>=0.5.17,<0.5.18"
# RMSNorms (hidden size, dtype) whose fused kernel failed its proof: ours serves them.
_UNPROVEN_NORMS: set[tuple[int, Any]] = set()
_NORMS = ("RMSNorm", "LayerNorm", "GemmaRMSNorm", "Gemma3RMSNorm", "Gemma4RMSNorm")


def _linear(original):
    from sgl_det.kernels.linear import linear

    @wraps(original)
    def apply(self, layer, x, bias=None):
        return linear(x, layer.weight, bias)

    return apply


def _linear_into(original):
    from sgl_det.kernels.linear import linear

    @wraps(original)
    def apply_into(self, layer, x, output, bias=None):
        return output.copy_(linear(x, layer.weight, bias))

    return apply_into


def _qk_norm(original):
    from sglang.srt.environ import envs

    @wraps(original)
    def apply_qk_norm(*args, **kwargs):
        # SGLang leaves the fused kernel in deterministic mode; it is proven at start-up.
        with envs.SGLANG_ENABLE_DETERMINISTIC_INFERENCE.override(False):
            return original(*args, **kwargs)

    return apply_qk_norm


def _rms_norm(original):
    @wraps(original)
    def forward_cuda(self, x, residual=None, post_residual_addition=None):
        if (self.hidden_size, x.dtype) not in _UNPROVEN_NORMS:
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


def _enable(original):
    @wraps(original)
    def maybe_enable_batch_invariant_mode(self):
        from sgl_det.kernels import gpu_mode

        gpu_mode.enable(_shapes(self.model), dict(_row_checks(self.model, self.dtype)))

    return maybe_enable_batch_invariant_mode


def _idle(original):
    @wraps(original)
    def maybe_sleep_on_idle(self):
        from sgl_det.kernels import canary

        canary.tick()
        return original(self)

    return maybe_sleep_on_idle


def _shapes(model: Any) -> Iterator[Any]:
    """The linear layers of a loaded model, the output projection among them."""
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    from sgl_det.kernels.linear_candidates import Shape

    head = getattr(model, "lm_head", None)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        lookup = isinstance(module, VocabParallelEmbedding) and module is not head
        if weight is None or weight.dim() != 2 or lookup:
            continue
        n, k = weight.shape
        bias = getattr(module, "bias", None) is not None
        yield Shape(n=n, k=k, dtype=weight.dtype, bias=bias)


def _row_checks(model: Any, dtype: Any) -> Iterator[tuple[str, Callable[[], str]]]:
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
    """Which kernel serves; raises RuntimeError where every one depends on the batch."""
    found = _mismatch_of_norm(norm, dtype)
    if not found:
        return "fused"
    held = type(norm).__name__ == "RMSNorm" and not (
        norm.cast_x_before_out_mul or norm.variance_size_override is not None or norm.fp32_residual
    )
    if held:
        _UNPROVEN_NORMS.add((norm.hidden_size, dtype))
        again = _mismatch_of_norm(norm, dtype)
        if not again:
            return f"sgl_det, because a row of the fused one depends on the others: {found}"
        found = again
    raise RuntimeError(
        f"a row of {type(norm).__name__} ({_width(norm)} wide, {dtype}) depends on the others: "
        f"{found}; expected equal bits; serve another model, or report it"
    )


def _mismatch_of_norm(norm: Any, dtype: Any) -> str:
    from sgl_det.kernels.row_proof import first_mismatch

    x, residual = (_random_rows(_width(norm), dtype, seed) for seed in (0, 1))
    found = first_mismatch(lambda x: (norm.forward_cuda(x),), (x,))
    if not found and type(norm).__name__ in ("RMSNorm", "GemmaRMSNorm"):
        found = first_mismatch(norm.forward_cuda, (x, residual))
    return found


def _check_qk_norm(attention: Any, dtype: Any) -> str:
    from sglang.srt.models import utils

    from sgl_det.kernels.row_proof import first_mismatch

    a = attention

    def run(qkv):
        q, k, _ = qkv.split([a.q_size, a.kv_size, a.kv_size], dim=-1)
        return utils.apply_qk_norm(q, k, a.q_norm, a.k_norm, a.head_dim)

    found = first_mismatch(run, (_random_rows(a.q_size + 2 * a.kv_size, dtype, 0),))
    if found:
        raise RuntimeError(
            f"the norm of queries and keys ({a.head_dim} wide, {dtype}) depends on other rows: "
            f"{found}; expected equal bits; serve another model, or report it"
        )
    return "fused"


_UNQUANT = "sglang.srt.layers.quantization.unquant:UnquantizedLinearMethod"
_TABLE = (
    (
        "mode",
        "sglang.srt.model_executor.model_runner:ModelRunner.maybe_enable_batch_invariant_mode",
        "2d039059b531",
        "the loaded shapes are proven on this GPU, and every matrix product gets one order",
        _enable,
        "none: SGLang's mode takes one slow kernel for all shapes and proves nothing",
    ),
    (
        "linear",
        f"{_UNQUANT}.apply",
        "be591cb1fb4c",
        "every linear layer adds over K in ascending order, by the fastest kernel that does",
        _linear,
        "none: SGLang has no seam for a linear kernel",
    ),
    (
        "linear_into",
        f"{_UNQUANT}.apply_into",
        "c48d02395a20",
        "the same for layers that write into a given buffer",
        _linear_into,
        "none: SGLang has no seam for a linear kernel",
    ),
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
    (
        "canary",
        "sglang.srt.managers.scheduler:Scheduler.maybe_sleep_on_idle",
        "02d6a64295e8",
        "one case of the proof is repeated every few minutes in the idle server",
        _idle,
        "none: SGLang's plugins have no idle hook",
    ),
)


def patches() -> tuple[Patch, ...]:
    """The patches of a scheduler process that runs on a GPU, whatever its attention backend."""
    return tuple(
        Patch(
            name=f"gpu.{name}",
            target=target,
            requires=_REQUIRES,
            fingerprints=(fingerprint,),
            why=why,
            upstream=upstream,
            wrap=wrap,
        )
        for name, target, fingerprint, why, wrap, upstream in _TABLE
    )
