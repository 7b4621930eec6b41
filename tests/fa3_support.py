"""A twin of FA3 on the CPU, and requests for it: what is assumed of FA3, and nothing else.

A row's bits depend on the keys that it sees in its sequence, not on the other rows or sequences.
"""

from __future__ import annotations

import torch

from sgl_det.kernels.fa3_chunks import (
    Sequences,
    chunks_of,
    decode_attention,
    plan_decode,
)
from sgl_det.kernels.fa3_extend import extend_attention, plan_extend
from sgl_det.kernels.merge_chunks import reference

BF16 = torch.bfloat16
H, G, D, CHUNK, SLOTS, WIDTH = 4, 2, 64, 8, 160, 48
# Both sides of one, two and three chunks.
LENGTHS = (1, 7, 8, 9, 15, 16, 17, 29)


class Pool:
    """Keys and values of requests of LENGTHS keys, scattered over slots; and a query for each."""

    def __init__(self, dtype=BF16):
        torch.manual_seed(3)
        self.k, self.v = torch.randn(2, SLOTS, 1, G, D).to(dtype)
        slots = torch.randperm(SLOTS, dtype=torch.int32)
        # What lies beyond a request's keys is another's, or was never written.
        self.table = torch.full((len(LENGTHS), WIDTH), SLOTS - 1, dtype=torch.int32)
        self.q, at = [], 0
        for b, n in enumerate(LENGTHS):
            self.table[b, :n] = slots[at : at + n]
            self.q.append(torch.randn(n, H, D).to(dtype))
            at += n
        self.seen: list[tuple[int, int]] = []

    def fa3(self, q, s: Sequences, out=None):
        """A call as FA3 does it, row by row; notes which row of q it gave which slot."""
        o = torch.empty_like(q) if out is None else out
        lse = torch.empty(H, len(q))
        starts, seen = s.starts.tolist(), []
        assert len(s.table) == len(s.lengths) == len(starts) - 1 and starts[-1] <= len(q)
        assert max((b - a for a, b in zip(starts, starts[1:], strict=False)), default=0) <= max(
            s.longest, 1
        )
        for v, keys in enumerate(s.lengths.tolist()):
            for i in range(starts[v], starts[v + 1]):
                visible = keys - (starts[v + 1] - 1 - i) if s.causal else keys
                slots = s.table[v, : max(visible, 0)].long()
                seen += [(i, slot) for slot in slots.tolist()]
                o[i], lse[:, i] = self.row(q[i], slots)
        self.seen = seen
        return o, lse

    def row(self, q, slots):
        """o [H, D] and lse [H] of one row over the keys in ``slots``; 0 and -inf without any."""
        if not len(slots):
            return torch.zeros_like(q), torch.full((H,), float("-inf"))
        k, v = (x[slots, 0].double().repeat_interleave(H // G, 1) for x in (self.k, self.v))
        s = (q.double() * k).sum(-1) * D**-0.5  # [keys, H]
        o = (torch.softmax(s, 0)[..., None] * v).sum(0)
        return o.to(q.dtype), torch.logsumexp(s, 0).float()

    def prefill(self, prefix, chunk=CHUNK, rows=64, many=1 << 30, **options):
        """New tokens after each ``prefix`` -> o and lse of every request.

        From ``many`` rows behind a chunk, the past chunks are taken in place.
        """
        new = [n - p for n, p in zip(LENGTHS, prefix, strict=True)]
        q = torch.cat([x[p:] for x, p in zip(self.q, prefix, strict=True)])
        plan = plan_extend(prefix, new, self.table, chunk, many_rows=many, most_rows=rows)
        o, lse = extend_attention(self.fa3, q, plan, merge=reference, **options)
        return o.split(new), lse.split(new, dim=1)

    def decode(self, chunk=CHUNK, spare=0, requests=None, **options):
        """The last token of each request -> o [B, H, D] and lse [H, B]."""
        b = list(range(len(LENGTHS))) if requests is None else requests
        lengths = torch.tensor([LENGTHS[i] for i in b], dtype=torch.int32)
        capacity = sum(chunks_of(LENGTHS[i], chunk) for i in b) + spare
        plan = plan_decode(lengths, self.table[b], chunk, capacity)
        lse, q = torch.empty(H, len(b)), torch.stack([self.q[i][-1] for i in b])
        o = decode_attention(self.fa3, q, plan, lse=lse, merge=reference, **options)
        return o, lse
