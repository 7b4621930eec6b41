"""Requests over a paged pool, and their attention in float64, for the tests of the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from sgl_det.kernels.attention import Launch, Options, attention
from sgl_det.kernels.attention_decode import Work, decode_attention


@dataclass
class Requests:
    """Requests of the given lengths, their keys scattered over a pool in random order."""

    heads: int
    groups: int
    d: int
    dtype: torch.dtype
    lengths: list[int]
    device: str
    seed: int = 0

    def __post_init__(self) -> None:
        source = torch.Generator().manual_seed(self.seed)
        slots, n = sum(self.lengths) + 7, len(self.lengths)
        shape = (slots, self.groups, self.d)
        self.k, self.v = (self._random(shape, source) for _ in range(2))
        self.q = [self._random((x, self.heads, self.d), source) for x in self.lengths]
        place = torch.randperm(slots, generator=source).int()
        table = torch.zeros((n + 1, max(self.lengths) + 3), dtype=torch.int32)
        self.rows = torch.arange(n).flip(0).to(self.device)
        ends = list(accumulate(self.lengths))
        for row, end, length in zip(self.rows.tolist(), ends, self.lengths, strict=True):
            table[row, :length] = place[end - length : end]
        self.table = table.to(self.device)

    def _random(self, shape, source) -> torch.Tensor:
        return torch.randn(shape, generator=source).to(self.dtype).to(self.device)

    def extend(self, options: Options, new: list[int], block_m: int | None = None):
        """The last ``new`` tokens of each request: ([o [new, H, D]], [lse [new, H]])."""
        parts = [q[len(q) - n :] for q, n in zip(self.q, new, strict=True)]
        starts = torch.tensor([0, *accumulate(new)], device=self.device)
        lengths = torch.tensor(self.lengths, device=self.device)
        q = torch.cat(parts)
        lse = torch.empty(q.shape[:2], device=self.device)
        pools = (self.k, self.v, self.table, self.rows)
        launch = Launch(block_m, 8 if block_m > 64 else 4, 2) if block_m else None
        o = attention(q, *pools, starts, lengths, max(new), options, lse=lse, launch=launch)
        return list(o.split(new)), list(lse.split(new))

    def decode(self, options: Options, shared: int):
        """The last token of each request: (o [B, H, D], lse [B, H])."""
        q = torch.stack([q[-1] for q in self.q])
        lse = torch.empty(q.shape[:2], device=self.device)
        work = Work.allocate(len(q), self.heads, max(self.lengths), self.d, self.device)
        lengths = torch.tensor(self.lengths, device=self.device)
        pools = (self.k, self.v, self.table, self.rows)
        o = decode_attention(q, *pools, lengths, options, work=work, shared=shared, lse=lse)
        return o, lse

    def exact(self, options: Options, request: int, position: int):
        """(o [H, D], lse [H]) of one token in float64."""
        slots = self.table[self.rows[request], : position + 1].long()
        share = self.heads // self.groups
        k, v = (x[slots].double().repeat_interleave(share, dim=1) for x in (self.k, self.v))
        s = torch.einsum("hd,shd->hs", self.q[request][position].double(), k) * options.scale
        if options.cap:
            s = options.cap * torch.tanh(s / options.cap)
        if options.window >= 0:
            s[:, : max(0, position - options.window)] = float("-inf")
        sinks = options.sinks
        whole = s if sinks is None else torch.cat([s, sinks.double()[:, None]], dim=1)
        lse = torch.logsumexp(whole, dim=1)
        return torch.einsum("hs,shd->hd", torch.exp(s - lse[:, None]), v), lse
