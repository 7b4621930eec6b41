"""Requests over one pool of keys, and the calls of attention on them, for `bench_attention.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial

import torch

from sgl_det.kernels.attention import Launch, Options, attention
from sgl_det.kernels.attention_decode import Work, decode_attention
from sgl_det.kernels.attention_order import Order, own
from sgl_det.patches import decode_programs

# query heads, key heads, head size
SHAPES = {"qwen3-8b": (32, 8, 128), "qwen2.5-7b": (28, 4, 128), "llama-3.2-1b": (32, 8, 64)}
CONTEXT = 40960  # the longest of the server whose launches are measured


class Case:
    """Requests of n keys each, scattered over a pool, and what upstream needs beside them."""

    def __init__(self, shape: str, m: int, n: int, new: int, order: Order | None = None):
        heads, groups, d = SHAPES[shape]
        kwargs = {"device": "cuda", "dtype": torch.bfloat16}
        self.m, self.n, self.new, self.heads, self.groups, self.d = m, n, new, heads, groups, d
        self.k, self.v = (torch.empty(m * n, groups, d, **kwargs).normal_() for _ in range(2))
        self.q = torch.empty(m * new, heads, d, **kwargs).normal_()
        self.table = torch.randperm(m * n, device="cuda").int().view(m, n)
        self.rows = torch.arange(m, device="cuda")
        self.lengths = torch.full((m,), n, device="cuda", dtype=torch.int64)
        self.starts = torch.arange(0, m * new + 1, new, device="cuda", dtype=torch.int64)
        self.take(order or own(d, torch.device("cuda")))

    def take(self, order: Order) -> None:
        """From now on attention is of this order."""
        self.order, self.options = order, Options(self.d**-0.5, order=order)
        for made in ("expected", "work"):
            vars(self).pop(made, None)

    @property
    def repeat(self) -> int:
        """Calls in a graph."""
        return max(1, min(16, 100_000_000 // (self.m * self.n * self.groups * self.d * 4)))

    @cached_property
    def expected(self) -> torch.Tensor:
        """Of the last token of each request, by one program each."""
        return self.decode(1, None)

    @cached_property
    def work(self) -> Work:
        sizes = (self.heads, self.groups, self.d, CONTEXT, self.order, torch.device("cuda"))
        return decode_programs.work_for(*sizes)

    @property
    def served(self) -> int:
        """Programs a request, as our server takes them."""
        return decode_programs.shared(self.work, self.m, self.groups, self.order)

    def decode(self, shared: int, work: Work | None, **launch) -> torch.Tensor:
        last = self.q[self.new - 1 :: self.new]
        pools = (self.k, self.v, self.table, self.rows, self.lengths)
        return decode_attention(last, *pools, self.options, work=work, shared=shared, **launch)

    def prefill(self, launch: Launch | None) -> torch.Tensor:
        pools = (self.k, self.v, self.table, self.rows, self.starts, self.lengths)
        return attention(self.q, *pools, self.new, self.options, launch=launch)

    def upstream_decode(self):
        """A call of SGLang's decode kernel, with the splits that normal mode chooses."""
        from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
        from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton

        most, q = 8, self.q[self.new - 1 :: self.new].contiguous()
        splits = torch.empty(self.m, dtype=torch.int32, device="cuda")
        cores = torch.cuda.get_device_properties(0).multi_processor_count
        sizes = (self.m, 1, self.heads, self.groups, most, cores)
        get_num_kv_splits_triton[(1,)](splits, self.lengths, *sizes, MAX_NUM_SEQ=256)
        parts = torch.empty(self.m, self.heads, most, self.d, device="cuda")
        lse = torch.empty(self.m, self.heads, most, device="cuda")
        starts = torch.arange(0, self.m * self.n + 1, self.n, device="cuda", dtype=torch.int32)
        slots, o = self.table.view(-1), torch.empty_like(q)
        paged = (self.k, self.v, o, starts, slots, parts, lse, splits, most, self.options.scale)
        return partial(decode_attention_fwd, q, *paged, 1.0, 1.0, use_pdl=True)

    def upstream_prefill(self):
        """A call of SGLang's extend kernel on prompts without a prefix."""
        from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

        k, v = (x[self.table.view(-1).long()] for x in (self.k, self.v))
        none = torch.zeros(self.m + 1, dtype=torch.int32, device="cuda")
        slots, o = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.empty_like(self.q)
        args = (self.q, k, v, o, self.k, self.v, self.starts, none, slots, None, True, None)
        scale = self.options.scale
        return partial(extend_attention_fwd, *args, self.new, 1.0, 1.0, sm_scale=scale)

    def differs(self, call: Callable[[], torch.Tensor]) -> int:
        """Elements of the requests' last tokens whose bits differ; decode has no others."""
        found = call()
        if len(found) > self.m:
            found = found[self.new - 1 :: self.new].contiguous()
        return int((found.view(torch.int16) != self.expected.view(torch.int16)).sum())
