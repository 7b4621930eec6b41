"""The CPU kernels' twins in plain PyTorch: slow, and equal bit for bit.

Each sum is written out in its order. `fma` is exact, so that a twin needs no fused instruction.
"""

from __future__ import annotations

import math

import torch

from sgl_det.kernels.order import reduction_order

_EXP = (1.98756915e-4, 1.39819995e-3, 8.33345191e-3, 4.16657959e-2, 1.66666655e-1, 5.00000012e-1)


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """``a * b + c`` in fp32 with one rounding, for fp32 tensors that broadcast.

    The product is exact in fp64. The sum is rounded to odd there, which makes the second rounding,
    to fp32, the only one that counts.
    """
    p, c = torch.broadcast_tensors(a.double() * b.double(), c.double())
    s = p + c
    t = s - p
    error = (p - (s - t)) + (c - t)
    bits = s.view(torch.int64)
    even = (bits & 1) == 0
    toward_zero = (error > 0) != (s > 0)
    odd = torch.where(toward_zero, bits - 1, bits + 1)
    inexact = (error != 0) & torch.isfinite(s) & even
    return torch.where(inexact, odd, bits).view(torch.float64).float()


def exp(x: torch.Tensor) -> torch.Tensor:
    """``e ** x`` for fp32 x <= 0 as the kernels compute it; 0 below -87."""
    magic = torch.tensor(12582912.0)
    t = fma(x, _f(1.44269504), magic)
    n = t - magic
    r = fma(n, _f(2.12194440e-4), fma(n, _f(-0.693359375), x))
    p = _f(_EXP[0])
    for c in _EXP[1:]:
        p = fma(p, r, _f(c))
    p = fma(p, r * r, r) + 1.0
    scale = torch.exp2(n.clamp(min=-126).double()).float()
    return torch.where(x < -87.0, torch.zeros(()), p * scale)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [M, K], weight [N, K], bias [N] -> [M, N]: k ascending into one fp32 accumulator."""
    # The product of two 16-bit floats is exact in fp32, so there the sum is the only rounding.
    exact = x.element_size() == weight.element_size() == 2
    a, b = x.float(), weight.float()
    acc = torch.zeros(len(a), len(b))
    for k in range(a.shape[1]):
        left, right = a[:, k, None], b[None, :, k]
        acc = acc + left * right if exact else fma(left, right, acc)
    if bias is not None:
        acc = acc + bias.float()
    return acc.to(out_dtype or x.dtype)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: int, scale: float, window=None
) -> torch.Tensor:
    """One query row q [H, D] at ``position`` over k [S, G, D], v [S, G, E] -> [H, E]."""
    tile, lanes = reduction_order("row_sum").block, reduction_order("row_sum").lanes
    share = q.shape[0] // k.shape[1]
    k, v = (x.float().repeat_interleave(share, dim=1) for x in (k, v))
    first = 0 if window is None else max(0, position - window)
    top = torch.full((len(q), 1), -math.inf)
    total, acc = torch.zeros(len(q), lanes), torch.zeros(len(q), v.shape[2])
    for t0 in range(first // tile * tile, position + 1, tile):
        lo, hi = max(first - t0, 0), min(position + 1 - t0, tile)
        seen = k[t0 + lo : t0 + hi].transpose(0, 1)  # [H, keys, D]
        score = torch.zeros(len(q), hi - lo)
        for d in range(q.shape[1]):
            score = fma(q[:, d, None].float(), seen[:, :, d], score)
        score = score * _f(scale)
        new = torch.maximum(top, score.amax(1, keepdim=True))
        if t0 + lo > first:
            shrink = exp(top - new)
            total, acc = total * shrink, acc * shrink
        top = new
        weights = torch.zeros(len(q), tile)
        weights[:, lo:hi] = exp(score - top)
        for j in range(0, tile, lanes):
            total = total + weights[:, j : j + lanes]
        for j in range(lo, hi):
            acc = fma(weights[:, j, None], v[t0 + j], acc)
    return (acc.double() / tree_sum(total)[:, None].double()).float().to(q.dtype)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [T, D], weight [D] -> (y, x + residual), both of x's dtype."""
    lanes = reduction_order("rms_norm").lanes
    h = x.float() if residual is None else x.float() + residual.float()
    total = torch.zeros(len(h), lanes)
    padded = torch.nn.functional.pad(h, (0, -h.shape[1] % lanes))
    for i in range(0, padded.shape[1], lanes):
        part = padded[:, i : i + lanes]
        total = fma(part, part, total)
    pairs = total[:, :16] + total[:, 16:]
    square = tree_sum(pairs[:, :8] + pairs[:, 8:])
    mean = (square.double() / h.shape[1]).float() + _f(eps)
    scale = _one_over_root(mean)
    return (h * scale[:, None] * weight.float()).to(x.dtype), h.to(x.dtype)


def _one_over_root(x: torch.Tensor) -> torch.Tensor:
    """Root and quotient each rounded correctly: PyTorch's own fp32 root may be off by one step."""
    root = torch.sqrt(x.double()).float()
    return (1.0 / root.double()).float()


def tree_sum(lanes: torch.Tensor) -> torch.Tensor:
    """Eight lanes [T, 8] in one tree: halves, quarters, pairs."""
    half = lanes[:, :4] + lanes[:, 4:]
    quarter = half[:, :2] + half[:, 2:]
    return quarter[:, 0] + quarter[:, 1]


def _f(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)
