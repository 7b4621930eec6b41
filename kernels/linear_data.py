"""Operands by which two kernels' orders can be told apart.

`realistic` has the scale of a model's. In `cancelling` every exact sum is zero, so a result is
nothing but the rounding errors of the order in which it was formed: nearly every element tells two
orders apart, where realistic data show about one in a thousand.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

KINDS = ("realistic", "cancelling")


class Operands(NamedTuple):
    """x [M, K], weight [N, K], bias [N] or None."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None


def operands(kind: str, shape, rows: int, device: str, seed: int = 0) -> Operands:
    """The operands of one kind for a `linear_candidates.Shape`, a function of the seed."""
    source = torch.Generator(device).manual_seed(seed)
    make = {"realistic": _realistic, "cancelling": _cancelling}[kind]
    return make(shape, rows, device, source)


def _normal(rows: int, columns: int, dtype, device, source, std: float) -> torch.Tensor:
    return torch.empty((rows, columns), dtype=dtype, device=device).normal_(
        0, std, generator=source
    )


def _realistic(shape, rows: int, device: str, source) -> Operands:
    x = _normal(rows, shape.k, shape.dtype, device, source, 1.0)
    weight = _normal(shape.n, shape.k, shape.dtype, device, source, 0.02)
    bias = _normal(1, shape.n, shape.dtype, device, source, 0.1)[0] if shape.bias else None
    return Operands(x, weight, bias)


def _cancelling(shape, rows: int, device: str, source) -> Operands:
    half = shape.k // 2
    there = torch.randperm(half, device=device, generator=source)
    x = torch.zeros((rows, shape.k), dtype=shape.dtype, device=device)
    weight = torch.zeros((shape.n, shape.k), dtype=shape.dtype, device=device)
    x[:, :half] = _normal(rows, half, shape.dtype, device, source, 32.0)
    weight[:, :half] = _normal(shape.n, half, shape.dtype, device, source, 32.0)
    x[:, half : 2 * half] = x[:, there]
    weight[:, half : 2 * half] = -weight[:, there]
    # As small as the rounding errors, so that it does not hide them.
    bias = _normal(1, shape.n, shape.dtype, device, source, 0.01)[0] if shape.bias else None
    return Operands(x, weight, bias)
