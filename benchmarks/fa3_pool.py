"""Requests over one pool of keys for FA3 on a GPU: plain calls, and by the planner of chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sgl_det.kernels import fa3_chunks, fa3_extend
from sgl_det.kernels.fa3_chunks import Sequences, told_longest

# query heads, key heads, head size; heads of 256 may be missing from a bundle.
MODELS = {
    **{"64 g1": (4, 4, 64), "64 g4": (32, 8, 64), "64 g7": (14, 2, 64), "64 g8": (16, 2, 64)},
    **{"128 g1": (4, 4, 128), "128 g4": (32, 8, 128), "128 g7": (28, 4, 128)},
    **{"128 g8": (16, 2, 128), "256 g4": (8, 2, 256)},
}


class Pool:
    """Requests whose keys lie scattered over one pool of slots, with a query for every token."""

    def __init__(self, model: str, lengths: Sequence[int], seed: int = 0):
        self.heads, self.groups, self.d = MODELS[model]
        made = torch.Generator("cuda").manual_seed(seed)
        size = {"generator": made, "device": "cuda", "dtype": torch.bfloat16}
        slots = sum(lengths) + 64
        self.k = torch.randn(slots, 1, self.groups, self.d, **size)
        self.v = torch.randn(slots, 1, self.groups, self.d, **size)
        self.q = [2 * torch.randn(n, self.heads, self.d, **size) for n in lengths]
        order = torch.randperm(slots, generator=made, device="cuda", dtype=torch.int32)
        self.lengths = list(lengths)
        self.table = order[-1].expand(len(lengths), max(lengths)).clone()
        for b, part in enumerate(order[: sum(lengths)].split(self.lengths)):
            self.table[b, : lengths[b]] = part

    def call(self, q, s: Sequences, out=None, pin: int | None = -1, **options):
        """FA3 -> o, lse. ``pin``: rows that it is told of; -1 for ours, None for the truth."""
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        told = told_longest(self.d, self.heads // self.groups, s.longest)
        options.setdefault("num_splits", 1)
        o, lse, *_ = flash_attn_with_kvcache(
            q=q,
            k_cache=self.k,
            v_cache=self.v,
            page_table=s.table,
            cache_seqlens=s.lengths,
            cu_seqlens_q=s.starts,
            max_seqlen_q=told if pin == -1 else pin or s.longest,
            softmax_scale=self.d**-0.5,
            causal=s.causal,
            return_softmax_lse=True,
            out=out,
            **options,
        )
        return o, lse

    def rows(self, ends, new, requests=None, causal=True, skip=0, **options):
        """Attention of the last ``new`` tokens of keys 0 .. ``ends`` of each request, one call.

        ``skip``: the queries are those of so many tokens before.
        """
        b = list(range(len(self.lengths))) if requests is None else requests
        cut = [(i, max(e - n - skip, 0), n) for i, e, n in zip(b, ends, new, strict=True)]
        q = torch.cat([self.q[i][first : first + n] for i, first, n in cut])
        starts = torch.tensor([0, *new], device="cuda").cumsum(0).int()
        lengths = torch.tensor(ends, dtype=torch.int32, device="cuda")
        s = Sequences(self.table[b].contiguous(), lengths, starts, max(new), causal)
        return self.call(q, s, **options)

    def chunked(self, prefix, new, chunk, requests=None, **how):
        """A prefill by the planner and the merge -> o, lse."""
        b = list(range(len(self.lengths))) if requests is None else requests
        plan = fa3_extend.plan_extend(prefix, new, self.table[b], chunk, **how)
        cut = zip(b, prefix, new, strict=True)
        q = torch.cat([self.q[i][p : p + n] for i, p, n in cut])
        return fa3_extend.extend_attention(self.call, q, plan)

    def decoded(self, ends, chunk, requests=None, spare=0) -> Callable[[], tuple]:
        """A decode step by the planner and the merge, to be called -> o, lse."""
        b = list(range(len(self.lengths))) if requests is None else requests
        q = torch.stack([self.q[i][e - 1] for i, e in zip(b, ends, strict=True)])
        lengths = torch.tensor(ends, dtype=torch.int32, device="cuda")
        capacity = sum(fa3_chunks.chunks_of(e, chunk) for e in ends) + spare
        lse = torch.empty(self.heads, len(b), device="cuda")
        table = self.table[b].contiguous()

        def step():
            plan = fa3_chunks.plan_decode(lengths, table, chunk, capacity)
            return fa3_chunks.decode_attention(self.call, q, plan, lse=lse), lse

        return step


def differ(a, b) -> int:
    """Elements of (o, lse) whose bits differ."""
    kinds = (torch.int16, torch.int32)
    pairs = zip(a, b, kinds, strict=True)
    return sum(int((x.contiguous().view(k) != y.contiguous().view(k)).sum()) for x, y, k in pairs)


def at(result, rows):
    """Rows of (o [T, H, D], lse [H, T])."""
    return result[0][rows], result[1][:, rows]
