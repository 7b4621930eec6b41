"""FlashAttention-3's order, computed for few requests of one new token by the whole GPU

FA3 takes a chunk of keys tile after tile in one thread block, so one request leaves most of a GPU
idle. Here everything but the chain is computed for all tiles at once: the scores, and then the
weights, since FA3's running maximum is known from the maxima of the tiles. The chain of rescales
and sums is left to a thread block for some of the columns of V, and one for the sums of weights. A
last kernel normalises and merges chunks as `merge_chunks` does. The bits are FA3's.

Shapes      q [B, H, D]   k_pool, v_pool [slots, G, D]   table [B, W] of slots   lengths [B]
            o [B, H, D]; between the kernels, in tiles of N keys: scores and weights [B, H, W'],
            ordered, the same weights, [B, W' / N, N / 16, 4, H, 4]; tops [B, H, W' / N], rescales
            [B, W' / N, H]; parts [B, chunks, H, D]; ends, maxima and sums, [2, B, chunks, H]
Dtypes      q, pools, weights, o: bf16; table, lengths int32; everything else fp32
Order       of `fa3_chunks`: tiles of N keys from the last to the first with a running maximum; a
            rescale of sum and values by exp2; p v by the matrix unit. Four sums a row: sum i takes
            the keys 2i and 2i + 1 of each eight, one after the other; then (0 + 2) + (1 + 3).
Bits depend on   D, N, C and the row's own keys - not on B, W, the grid, DV, warps or stages

Source: FlashAttention-3 (Shah et al., 2024, arXiv 2407.08608); the order of its sums was read in
its machine code and is proven where a server starts. Fusing of products and sums is switched off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import triton

from sgl_det.kernels.attention_decode import multiprocessors
from sgl_det.kernels.attention_proof import Heads
from sgl_det.kernels.fa3_chunks import CHUNKS, TILES, chunks_of
from sgl_det.kernels.fa3_decode_kernels import (
    fa3_chain_kernel,
    fa3_finish_kernel,
    fa3_scores_kernel,
    fa3_weights_kernel,
)

HEAD_DIMS, DTYPES = (64, 128), (torch.bfloat16,)
# Heads whose weights a thread block sums, four sums each. Any number, the same bits.
_HEADS = 32
# Thread blocks that score, a multiprocessor.
_SCORE_BLOCKS = 2


class Launch(NamedTuple):
    """Columns of V a thread block, its warps, and tiles in flight. Any choice, the same bits."""

    dv: int
    warps: int
    stages: int


_LAUNCH = Launch(32, 4, 7)


@dataclass(frozen=True, slots=True)
class Few:
    """Few requests: their lengths, where their keys lie, and how many chunks a request has at most.

    lengths [B] and table [B, W], int32
    """

    lengths: torch.Tensor
    table: torch.Tensor
    chunks: int


def plan_few(lengths: torch.Tensor, table: torch.Tensor, longest: int, heads: Heads) -> Few | None:
    """The plan of requests of at most ``longest`` keys; None where FA3 is faster, or has to do it.

    Measured on an H200: beyond 16 pairs of a request and a key head, or beyond one chunk, FA3 has
    work for the GPU.
    """
    held = heads.d in HEAD_DIMS and heads.dtype in DTYPES and lengths.is_cuda
    chunks = chunks_of(longest, CHUNKS[heads.d])
    if not held or chunks > 1 or len(lengths) * heads.keys > 16 or heads.queries > 16 * heads.keys:
        return None
    return Few(lengths, table, chunks)


@cache
def _factors(scale: float) -> tuple[float, float]:
    """What turns a score into a power of two, and into one of e; fp32, as FA3 rounds them."""
    log2 = np.float32(float(np.float32(scale)) * math.log2(math.e))
    return float(log2), float(log2 * np.float32(math.log(2)))


def decode_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    few: Few,
    scale: float,
    *,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    chunk: int | None = None,
    blocks: int | None = None,
    launch: Launch | None = None,
    exact: bool = False,
) -> torch.Tensor:
    """Attention of one row a request over all its keys -> o [B, H, D].

    chunk   keys, by default that of `fa3_chunks`; blocks: thread blocks a key head that score
    exact   a true division and logarithm, for an interpreter: near FA3, not equal
    Raises ValueError on what is not held.
    """
    batch, heads, d = q.shape
    groups, dtype = k_pool.shape[1], q.dtype
    if d not in HEAD_DIMS or dtype not in DTYPES or heads // groups > 16:
        raise ValueError(f"no decode in FA3's order for {heads}/{groups} heads of {d} in {dtype}")
    o = torch.empty_like(q) if out is None else out
    n, chunk, group = TILES[d], chunk or CHUNKS[d], heads // groups
    tiles = triton.cdiv(min(few.table.shape[1], few.chunks * chunk), n)
    work = _Work.allocate(q, tiles, n, few.chunks)
    most = blocks or max(1, _SCORE_BLOCKS * multiprocessors(q.device) // (groups * batch))
    log2, log = _factors(scale)
    launch, lengths, stride = launch or _LAUNCH, few.lengths, tiles * n
    same = {"H": heads, "enable_fp_fusion": False}
    tiled = same | {"GROUP": group, "N": n}
    fa3_scores_kernel[(groups, min(tiles, most), batch)](
        q, k_pool, few.table, lengths, work.scores, work.tops, q.stride(0), q.stride(1),
        k_pool.stride(0), k_pool.stride(1), few.table.stride(0), stride, D=d, BLOCK_M=16,
        num_warps=4, num_stages=3, **tiled,
    )  # fmt: skip
    fa3_weights_kernel[(groups, min(tiles, 2 * most), batch)](
        lengths, work.scores, work.tops, work.ordered, work.weights, work.rescales, stride, log2,
        BLOCK_G=triton.next_power_of_2(group), TILES=chunk // n, num_warps=2, **tiled,
    )  # fmt: skip
    fa3_chain_kernel[(groups, few.chunks * (d // launch.dv + 1), batch)](
        v_pool, few.table, lengths, work.tops, work.ordered, work.weights, work.rescales,
        work.parts, work.ends, v_pool.stride(0), v_pool.stride(1), few.table.stride(0), stride,
        few.chunks, D=d, DV=launch.dv, CHUNK=chunk, HEADS=_HEADS, num_warps=launch.warps,
        num_stages=launch.stages, **tiled,
    )  # fmt: skip
    fa3_finish_kernel[(heads, batch)](
        work.parts, work.ends, lengths, sinks, o, o.stride(0), o.stride(1), log, few.chunks, D=d,
        CHUNK=chunk, UNROLL=min(8, triton.next_power_of_2(few.chunks)), SINKS=sinks is not None,
        EXACT=exact, num_warps=1, **same,
    )  # fmt: skip
    return o


class _Work(NamedTuple):
    """What the kernels leave for the next one: see the header."""

    scores: torch.Tensor
    tops: torch.Tensor
    ordered: torch.Tensor
    weights: torch.Tensor
    rescales: torch.Tensor
    parts: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def allocate(cls, q: torch.Tensor, tiles: int, n: int, chunks: int) -> _Work:
        batch, heads, d = q.shape
        keys, short = (batch, heads, tiles * n), (batch, heads, tiles)
        full = {"dtype": torch.float32, "device": q.device}
        return cls(
            scores=torch.empty(keys, **full),
            tops=torch.empty(short, **full),
            ordered=torch.empty(keys, **full),
            weights=torch.empty(keys, dtype=q.dtype, device=q.device),
            rescales=torch.empty(short, **full),
            parts=torch.empty((batch, chunks, heads, d), **full),
            ends=torch.empty((2, batch, chunks, heads), **full),
        )
