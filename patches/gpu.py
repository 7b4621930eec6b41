"""A model on a GPU: every linear layer in one order, by the fastest kernel proven to keep it.

SGLang's batch-invariant mode stays off: ours is installed where SGLang would switch it on.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Any

from sgl_det.patch import Patch
from sgl_det.patches import norms
from sgl_det.patches.table import patches_of


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


def _enable(original):
    @wraps(original)
    def maybe_enable_batch_invariant_mode(self):
        from sgl_det.kernels import gpu_mode, sampler_proof

        checks = dict(norms.row_checks(self.model, self.dtype))
        gpu_mode.enable(_shapes(self.model), checks | {"sampler": sampler_proof.check})

    return maybe_enable_batch_invariant_mode


def _shapes(model: Any) -> Iterator[Any]:
    """The linear layers of a loaded model, the output projection among them."""
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    from sgl_det.kernels.linear_candidates import Shape

    embeddings = (m for m in model.modules() if isinstance(m, VocabParallelEmbedding))
    # Gemma has no projection beside its embedding, and multiplies by that.
    head = getattr(model, "lm_head", None) or next(embeddings, None)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        lookup = isinstance(module, VocabParallelEmbedding) and module is not head
        if weight is None or weight.dim() != 2 or lookup:
            continue
        n, k = weight.shape
        bias = getattr(module, "bias", None) is not None
        yield Shape(n=n, k=k, dtype=weight.dtype, bias=bias)


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
)


def patches() -> tuple[Patch, ...]:
    """The patches of a scheduler process that runs on a GPU, whatever its attention backend."""
    return patches_of("gpu", _TABLE)
