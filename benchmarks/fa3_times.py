"""Times of FA3 in one pass, in chunks, and as SGLang's normal mode splits; in CUDA graphs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
from fa3_pool import MODELS

from sgl_det.kernels import fa3_chunks, fa3_extend
from sgl_det.kernels.fa3_chunks import Sequences, told_longest
from sgl_det.kernels.graph_timing import captured, replay_us

DECODE = [(b, n) for n in (512, 2048, 8192, 32768) for b in (1, 4, 16, 64, 256)]
# Requests, keys from the cache, new tokens.
PREFILL = [(8, 0, 1024), (2, 0, 4096), (1, 0, 16384), (1, 24576, 8192), (4, 30000, 100)]
CHUNKS = (2048, 4096, 8192)
ROUNDS, LEAST_US, BEYOND_L2, MOST_LAYERS = 5, 2000, 200_000_000, 16


class Layers:
    """As many layers of keys and values of ``m`` requests of ``n`` keys as the L2 cannot hold."""

    def __init__(self, model: str, m: int, n: int, new: int):
        self.heads, self.groups, self.d = MODELS[model]
        size = {"device": "cuda", "dtype": torch.bfloat16}
        layers = BEYOND_L2 // (m * n * self.groups * self.d * 4) + 1
        shape = (min(MOST_LAYERS, layers), m * n, 1, self.groups, self.d)
        self.k, self.v = (torch.empty(shape, **size).normal_() for _ in range(2))
        self.q = torch.empty(m * new, self.heads, self.d, **size).normal_()
        self.table = torch.randperm(m * n, device="cuda").int().view(m, n)
        self.lengths = torch.full((m,), n, device="cuda", dtype=torch.int32)
        starts = torch.arange(0, m * new + 1, new, device="cuda").int()
        self.whole = Sequences(self.table, self.lengths, starts, new, True)

    def told(self, s: Sequences) -> int:
        return told_longest(self.d, self.heads // self.groups, s.longest)

    def call(self, layer: int, q, s: Sequences, out=None, *, normal=False, made=None):
        """FA3 -> o, lse; ``normal`` as SGLang without deterministic mode; ``made``: metadata."""
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        o, lse, *_ = flash_attn_with_kvcache(
            q=q,
            k_cache=self.k[layer],
            v_cache=self.v[layer],
            page_table=s.table,
            cache_seqlens=s.lengths,
            cu_seqlens_q=s.starts,
            max_seqlen_q=s.longest if normal else self.told(s),
            softmax_scale=self.d**-0.5,
            causal=s.causal,
            num_splits=0 if normal else 1,
            scheduler_metadata=made,
            out=out,
            return_softmax_lse=True,
        )
        return o, lse

    def metadata(self, s: Sequences, normal: bool = False) -> torch.Tensor:
        """The schedule of a call, made once a step and not in every layer."""
        from sgl_kernel.flash_attn import get_scheduler_metadata

        return get_scheduler_metadata(
            batch_size=len(s.lengths),
            max_seqlen_q=s.longest if normal else self.told(s),
            max_seqlen_k=s.table.shape[1],
            num_heads=self.heads,
            num_heads_k=self.groups,
            headdim=self.d,
            cache_seqlens=s.lengths,
            qkv_dtype=torch.bfloat16,
            cu_seqlens_q=s.starts,
            page_size=1,
            causal=s.causal,
            num_splits=0 if normal else 1,
        )

    def measured(self, arms: dict[str, Callable[[int], object]]) -> dict[str, float | str]:
        """Microseconds a layer of each arm, a function of the layer; the arms in turn."""
        graphs, times, layers = {}, {}, range(len(self.k))
        for name, arm in arms.items():
            try:
                graphs[name] = captured([partial(arm, i) for i in layers])
            except TimeoutError:
                raise
            except Exception as error:  # an arm that fails leaves the others
                times[name] = f"{type(error).__name__}: {error}"[:200]
        for name, graph in graphs.items():
            once = replay_us(graph, 1)
            times[name] = [max(1, round(LEAST_US / once))]
        for _ in range(ROUNDS):
            for name, graph in graphs.items():
                times[name].append(replay_us(graph, times[name][0]) / len(layers))
        return {
            name: t if isinstance(t, str) else round(statistics.median(t[1:]), 2)
            for name, t in times.items()
        }


def decode_times(say: Callable[..., None], model: str) -> None:
    """One layer of a decode step; what is planned once a step is not in it, but timed beside."""
    for m, n in DECODE:
        x = Layers(model, m, n, 1)
        normal, one_pass = x.metadata(x.whole, normal=True), x.metadata(x.whole)
        arms = {
            "normal": partial(x.call, q=x.q, s=x.whole, normal=True, made=normal),
            "one pass": partial(x.call, q=x.q, s=x.whole, made=one_pass),
            "one pass, metadata in the layer": partial(x.call, q=x.q, s=x.whole),
        }
        for chunk in CHUNKS:
            used = m * fa3_chunks.chunks_of(n, chunk)
            plan = fa3_chunks.plan_decode(x.lengths, x.table, chunk, used)
            arms[f"{chunk}"] = partial(_decode, x, plan, None)
            if chunk == 4096:
                made = x.metadata(plan.sequences)
                arms[f"{chunk}, metadata"] = partial(_decode, x, plan, made)
                spare = fa3_chunks.plan_decode(x.lengths, x.table, chunk, used + 250)
                arms[f"{chunk}, 250 spare"] = partial(_decode, x, spare, None)
                make = partial(fa3_chunks.plan_decode, x.lengths, x.table, chunk, used)
                arms["planning a step"] = lambda _layer, make=make: make()
        say(f"{model} decode {m} x {n}", x.measured(arms))
        del x, arms, plan, spare, make
        torch.cuda.empty_cache()


def _decode(x: Layers, plan, made, layer: int):
    call = partial(x.call, layer, made=made)
    return fa3_chunks.decode_attention(lambda q, s, out: call(q, s), x.q, plan)


def prefill_times(say: Callable[..., None], model: str) -> None:
    """One layer of a prefill, with and without a prefix from the cache."""
    for m, prefix, new in PREFILL:
        x = Layers(model, m, prefix + new, new)
        arms = {
            "normal": partial(x.call, q=x.q, s=x.whole, normal=True),
            "one pass": partial(x.call, q=x.q, s=x.whole),
        }
        for chunk in CHUNKS:
            plan = fa3_extend.plan_extend([prefix] * m, [new] * m, x.table, chunk)
            arms[f"{chunk}"] = partial(_extend, x, plan)
        say(f"{model} prefill {m} x {new} after {prefix}", x.measured(arms))
        del x, arms, plan
        torch.cuda.empty_cache()


def _extend(x: Layers, plan, layer: int):
    return fa3_extend.extend_attention(partial(x.call, layer), x.q, plan)
