"""Calls of FlashInfer's FA2 paged kernel with our plan or its own; keys scattered in a pool."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from sgl_det.kernels.flashinfer_plan import Heads, plan

DEVICE, WORKSPACE = "cuda", 4 << 30
QWEN = Heads(qo=32, kv=8, dim=128)
CONTEXT, POOL = 40960, 500_000  # what a server of that model has


@cache
def floats() -> torch.Tensor:
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=DEVICE)


def indptr(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def on_gpu(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE)


def differing(rows: torch.Tensor, expected: torch.Tensor) -> int:
    """Rows [T] of [T, H, D] in which any bit differs, or any value is NaN."""
    bad = (rows.view(torch.int16) != expected.view(torch.int16)) | rows.isnan()
    return int(bad.flatten(1).any(1).sum())


class Pool:
    """Requests of n keys each, scattered over a pool with pages of one token."""

    def __init__(self, heads: Heads, requests: int, n: int, queries: int | None = None):
        source = torch.Generator(DEVICE).manual_seed(heads.dim + n)
        kwargs = {"device": DEVICE, "dtype": torch.bfloat16}
        self.heads, self.n = heads, n
        shape = (requests * n, 1, heads.kv, heads.dim)
        self.k, self.v = (torch.empty(shape, **kwargs).normal_(generator=source) for _ in "kv")
        queries = n if queries is None else queries
        self.q = torch.empty(requests, queries, heads.qo, heads.dim, **kwargs)
        # Wide enough for the maximum to move between tiles, as in a trained model.
        self.q.normal_(std=3, generator=source)
        table = torch.randperm(requests * n, device=DEVICE, generator=source)
        self.table = table.int().view(requests, n)


class Call:
    """One plan, and what its kernel reads; calling it launches the kernel.

    spans    (request, first, end): new tokens at these positions, all keys before ``end``
    vector   FlashInfer's own plan, with its integer workspace; ours if it is None
    """

    def __init__(self, module, pool, spans, *, tile=0, chunk=0, causal=True, sizes=None, own=None):
        self.module, self.pool, self.causal = module, pool, causal
        qo, kv = indptr([e - f for _, f, e in spans]), indptr([e for *_, e in spans])
        if own:
            self.vector, self.ints = own(qo, kv)
        else:
            numbers = {"tile": tile, "chunk": chunk, "sizes": sizes}
            made = plan(qo, kv, pool.heads, float_bytes=floats().numel(), **numbers)
            self.vector, self.ints = made.vector, on_gpu(made.image)
        some = pool.q.shape[1] < pool.n  # decode: the last token's queries alone
        self.q = torch.cat([pool.q[r] if some else pool.q[r, f:e] for r, f, e in spans])
        self.indices = torch.cat([pool.table[r, :e] for r, _, e in spans])
        self.qo, self.kv = on_gpu(qo), on_gpu(kv)
        self.last = torch.ones(len(spans), dtype=torch.int32, device=DEVICE)
        self.o = torch.full_like(self.q, float("nan"))

    def __call__(self) -> torch.Tensor:
        paged = (self.pool.k, self.pool.v, self.qo, self.kv, self.indices, self.last)
        head = (floats(), self.ints, self.vector, self.q, *paged, self.o, None)
        scales = (0.0, self.pool.heads.dim**-0.5, 1.0, 1e-4, 0)
        self.module.paged_run(*head, int(self.causal), 0, -1, True, *[None] * 8, *scales)
        return self.o
