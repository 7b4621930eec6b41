"""FlashInfer's paged kernel and its merge in numpy, driven by a plan as the GPU is.

A row's bits depend on that row alone: products are summed along one axis. With ``exact`` false the
rescale of a tile in which the maximum stands still is a little more than 1, as in the stock kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

_MASKED = np.float32(-5e4)


def one_kv_tile(tile: int) -> int:
    """Of the edited kernel; the stock one has other KV tiles for other query tiles."""
    return 64


class Emulator:
    def __init__(self, exact: bool = True, kv_tile: Callable[[int], int] = one_kv_tile):
        self.exact, self.kv_tile = exact, kv_tile

    def paged_run(self, floats, ints, vector, q, k, v, qo, kv, indices, last, o, lse, *rest):
        mask, layout, window, _pdl, *optional, cap, scale, _, _, _ = rest
        assert (layout, window, cap) == (0, -1, 0.0) and optional == [None] * 8
        run = _Run(vector, ints.numpy(), qo.numpy(), kv.numpy(), q.shape[1:], k.shape[2])
        keys = [x[:, 0].float().numpy()[indices.numpy()] for x in (k, v)]
        for item in run.items():
            for head in range(run.kv_heads):
                self._item(run, item, head, q.float().numpy(), *keys, mask == 1, scale, o)
        if run.split:
            run.merge(o)

    def _item(self, run, item, head, q, k, v, causal, scale, o):
        request, tile, split = item
        first, keys = run.kv[request], int(run.kv[request + 1] - run.kv[request])
        new = int(run.qo[request + 1] - run.qo[request])
        packed = np.arange(tile * run.tile, min((tile + 1) * run.tile, new * run.group))
        token, heads = packed // run.group, head * run.group + packed % run.group
        seen = keys - new + token + 1 if causal else np.full(len(token), keys)
        start, end = (
            min(x * run.chunk, keys) if run.split else x * keys for x in (split, split + 1)
        )
        # As the kernel: to the last row that the tile could have, not to the last that it has.
        limit = keys - new + -(-(tile + 1) * run.tile // run.group) if causal else end
        m, d = np.full(len(token), _MASKED), np.zeros(len(token), np.float32)
        acc = np.zeros((len(token), q.shape[2]), np.float32)
        step = self.kv_tile(run.tile)
        for at in range(start, max(min(end, limit), start), step):
            # A whole tile, whatever is in it: numpy's order of a sum follows its length.
            place = np.arange(at, at + step)
            visible = place[None] < np.minimum(seen, end)[:, None]
            place = np.minimum(place, end - 1)
            s = (q[run.qo[request] + token, heads][:, None] * k[first + place, head][None]).sum(-1)
            s = np.where(visible, s * np.float32(scale * 1.442695), _MASKED)
            top = np.maximum(m, s.max(1))
            scaled = np.exp2(m - top)
            if not self.exact:
                scaled = np.where(m == top, np.float32(1 + 2e-5), scaled)
            p = np.where(visible, np.exp2(s - top[:, None]), np.float32(0))
            d, m = d * scaled + p.sum(1), top
            acc = acc * scaled[:, None] + (p[:, :, None] * v[first + place, head][None]).sum(1)
        safe = np.where(d > 0, d, np.float32(1))
        run.write(o, request, token, split, heads, acc / safe[:, None], np.log2(safe) + m, keys)


class _Run:
    """A plan as the kernel reads it, and its partial results; a slot is written once."""

    def __init__(self, vector, image, qo, kv, shape, kv_heads):
        self.blocks, rows, at_rows, self.tile, *at = vector[:10]
        self.v, self.s, self.valid, self.graph, self.split = vector[10:]
        self.image, self.qo, self.kv, self.kv_heads = image, qo, kv, kv_heads
        self.heads, self.dim = shape
        self.group = self.heads // kv_heads
        self.arrays = [self._ints(x, self.blocks) for x in at[:3]]
        self.o_indptr, self.chunk = self._ints(at[4], len(qo)), int(self._ints(at[5], 1)[0])
        if self.split:
            self.live = int(self._ints(at_rows, 1)[0]) if self.graph else rows
            self.merge_indptr = self._ints(at[3], self.live + 1)
            slots = (self.s - self.v) // (2 * self.heads * self.dim)
            self.values = np.full((slots, self.heads, self.dim), np.nan, np.float32)
            self.lse = np.full((slots, self.heads), np.nan, np.float32)

    def _ints(self, offset, count):
        return self.image[offset : offset + 4 * count].view(np.int32)

    def items(self):
        for i, item in enumerate(zip(*(a.tolist() for a in self.arrays), strict=True)):
            if not (self.split and self.graph) or self.image[self.valid + i]:
                yield item

    def write(self, o, request, token, split, heads, values, lse, keys):
        rounded = torch.from_numpy(values).to(o.dtype)
        if not self.split:
            rows = torch.from_numpy(self.o_indptr[request] + token).long()
            o[rows, torch.from_numpy(heads)] = rounded
            return
        slots = self.o_indptr[request] + token * -(-max(keys, 1) // self.chunk) + split
        assert np.isnan(self.lse[slots, heads]).all()
        self.values[slots, heads], self.lse[slots, heads] = rounded.float().numpy(), lse

    def merge(self, o):
        for row in range(self.live):
            first, end = self.merge_indptr[row : row + 2]
            m, d, acc = self.lse[first], np.float32(1), self.values[first]
            for slot in range(first + 1, end):
                top = np.maximum(m, self.lse[slot])
                old, new = np.exp2(m - top), np.exp2(self.lse[slot] - top)
                acc = acc * old[:, None] + self.values[slot] * new[:, None]
                d, m = d * old + new, top
            o[row] = torch.from_numpy(acc / np.broadcast_to(d, m.shape)[:, None]).to(o.dtype)
