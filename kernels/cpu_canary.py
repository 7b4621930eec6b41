"""The cases that an idle server on a CPU repeats: a few rows of each kernel, with their first bits.

They are made right after the self-test has passed, so the bits kept are the canonical ones. Each
holds its own operands (of a layer at most _COLUMNS outputs), and takes a few milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from sgl_det.kernels import cpu, sampler_proof
from sgl_det.kernels.canary import Case

_COLUMNS, _ROWS, _KEYS = 40, 5, 130
_C = "the C kernel"


def cases(weights: Iterable[torch.Tensor], heads: tuple) -> list[Case]:
    """A case for each weight [N, K], for attention (`cpu_self_test.Heads`), norms and sampler."""
    weights, rng = list(weights), torch.Generator().manual_seed(1)
    dtype = heads[-1]
    sizes = sorted({w.shape[1] for w in weights})
    return [
        *(_linear(w, dtype, rng) for w in weights),
        _attention(heads, rng),
        *(_rms_norm(d, dtype, rng) for d in sizes),
        Case(_C, "the sampler", lambda: _raised(lambda: sampler_proof.check("cpu"))),
    ]


def _linear(weight: torch.Tensor, dtype: torch.dtype, rng: torch.Generator) -> Case:
    n, k = weight.shape
    # Weights may be written to while the server runs: the canary keeps its own.
    few = weight[: min(n, _COLUMNS)].clone()
    x = _normal((_ROWS, k), dtype, rng)
    # In fp32 a sum shows its last digits.
    return _kept(f"the linear layer {n}x{k}", lambda: cpu.linear(x, few, None, torch.float32))


def _attention(heads: tuple, rng: torch.Generator) -> Case:
    h, g, d, e, dtype = heads
    k, v = _normal((_KEYS, g, d), dtype, rng), _normal((_KEYS, g, e), dtype, rng)
    q = _normal((1, h, d), torch.float32, rng)
    page = torch.randperm(_KEYS, generator=rng).to(torch.int32)[None]
    zero = torch.zeros(1, dtype=torch.int64)

    def decode() -> torch.Tensor:
        out = q.new_empty((1, h, e))
        return cpu.attention(q, out, k, v, page, zero, zero + _KEYS, None, scale=d**-0.5)

    return _kept(f"attention of {h}/{g} heads of {d}", decode)


def _rms_norm(d: int, dtype: torch.dtype, rng: torch.Generator) -> Case:
    x, weight = _normal((_ROWS, d), dtype, rng), _normal((d,), dtype, rng)
    return _kept(f"rms_norm of {d}", lambda: cpu.rms_norm(x, weight, 1e-6))


def _kept(what: str, run: Callable[[], torch.Tensor]) -> Case:
    first = run().view(torch.uint8).clone()

    def differs() -> str:
        now = run().view(torch.uint8)
        count = int((now != first).sum())
        return f"{count} of {first.numel()} bytes differ" if count else ""

    return Case(_C, what, differs)


def _raised(check: Callable[[], object]) -> str:
    try:
        check()
    except RuntimeError as error:
        return str(error)
    return ""


def _normal(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=rng).to(dtype)
