"""The linear layer as it is served: one order, and for each number of rows the fastest kernel.

A `Plan` says which proven kernel serves which bucket of rows. A layer without a plan is computed by
the canonical kernel: the same bits, slower.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sgl_det.kernels import matmul
from sgl_det.kernels.linear_candidates import Candidate, Shape


@dataclass(frozen=True, slots=True)
class Plan:
    """Which kernel serves up to how many rows: chosen[i] for those up to edges[i]."""

    edges: tuple[int, ...]
    chosen: tuple[Candidate, ...]

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias) -> torch.Tensor:
        """x [M, K] -> [M, N]. More rows than the last edge are computed in pieces."""
        most = self.edges[-1]
        if len(x) <= most:
            return self.chosen[bisect_left(self.edges, len(x))].run(x, weight, bias)
        return torch.cat([self(part, weight, bias) for part in x.split(most)])


PLANS: dict[Shape, Plan] = {}


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y[..., n] = sum_k x[..., k] * weight[n, k] + bias[n], for 2-D weight [N, K].

    Strides and alignment of x never choose the kernel: rows that are not laid out as they were in
    the proof are copied first. A weight or bias that is not gets the canonical
    kernel.
    Raises ValueError on dtypes or shapes that the kernels do not hold.
    """
    rows, (n, k) = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), weight.shape
    matmul.check_operands(rows, weight, bias)
    if not rows.numel() or not n:
        y = x.new_zeros((*x.shape[:-1], n))
        return y if bias is None else y + bias
    rows = rows if _as_proven(rows) else rows.clone(memory_format=torch.contiguous_format)
    plan = PLANS.get(Shape(n=n, k=k, dtype=x.dtype, bias=bias is not None))
    proven = _as_proven(weight) and (bias is None or bias.data_ptr() % 16 == 0)
    run = plan if plan is not None and proven else matmul.matmul
    return run(rows, weight, bias).view(*x.shape[:-1], n)


def _as_proven(t: torch.Tensor) -> bool:
    """Whether a matrix has no gaps and starts at a multiple of 16 bytes, as those of the proof."""
    return t.is_contiguous() and t.data_ptr() % 16 == 0


def install(plans: dict[Shape, Plan]) -> None:
    """Serve these layers by these plans from now on."""
    PLANS.clear()
    PLANS.update(plans)


def plan(edges: Sequence[int], names: Sequence[str], known: Sequence[Candidate]) -> Plan:
    """The plan in which the candidate names[i] serves up to edges[i] rows. KeyError if unknown."""
    by_name = {c.name: c for c in known}
    return Plan(tuple(edges), tuple(by_name[name] for name in names))
