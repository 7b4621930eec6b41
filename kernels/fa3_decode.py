"""FlashAttention-3's order, computed for few requests of one new token by the whole GPU

FA3 takes a chunk of keys tile after tile in one thread block, so one request leaves most of a GPU
idle. Here a first kernel takes the scores of all tiles at once. The maxima of the tiles give FA3's
running maximum, so that a second one, `fa3_chain`, has all weights at once; to its thread blocks,
each for some of the columns of V, the chain of rescales and sums is left. Where a request has
several chunks or a sink, a last kernel normalises and merges as `merge_chunks` does. The bits are
FA3's.

Shapes      q [B, H, D]   k_pool, v_pool [slots, G, D]   table [B, W] of slots   lengths [B]
            o [B, H, D]; between the kernels, in tiles of N keys: scores [B, H, W'] and their maxima
            tops [B, H, W' / N]; parts [B, chunks, H, D]; ends, which are maxima and sums,
            [2, B, chunks, H]
Dtypes      q, pools, o: bf16; table, lengths int32; everything else fp32
Order       of `fa3_chunks`: tiles of N keys from the last to the first with a running maximum; a
            rescale of sum and values by exp2; p v by the matrix unit. Four sums a row: sum i takes
            the keys 2i and 2i + 1 of each eight, one after the other; then (0 + 2) + (1 + 3).
Bits depend on   D, N, C and the row's own keys - not on B, W, the grid or a launch

Source: FlashAttention-3 (Shah et al., 2024, arXiv 2407.08608). Its four sums follow from how the
matrix unit lays out a row; a test compares the bits with FA3's on the GPU, and so does the proof
where a server starts. Fusing of products and sums is switched off at launch.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import triton

from sgl_det.kernels import fa3_chain
from sgl_det.kernels.attention import check
from sgl_det.kernels.attention_decode import multiprocessors
from sgl_det.kernels.attention_proof import Heads
from sgl_det.kernels.fa3_chunks import CHUNKS, TILES, chunks_of
from sgl_det.kernels.fa3_decode_kernels import fa3_finish_kernel, fa3_scores_kernel

HEAD_DIMS, DTYPES = (64, 128), (torch.bfloat16,)
# The most requests times key heads that are few, of one chunk each and of several.
_PAIRS, _PAIRS_OF_CHUNKS = 64, 16
# Chunks of a request for which a graph has thread blocks, which cost time where they are idle.
_MOST_CHUNKS = 64
# Thread blocks that score, a multiprocessor.
_SCORE_BLOCKS = 4


class Few(NamedTuple):
    """The plan of few requests: how many chunks one has at most."""

    chunks: int


def plan_few(lengths: torch.Tensor, longest: int, heads: Heads) -> Few | None:
    """The plan of requests of at most ``longest`` keys; None where FA3 is faster, or has to do it.

    lengths [B] on the GPU. On an H200, with 8 key heads of 128, these kernels are faster for up to
    eight requests within one chunk. Beyond it they are for one, and for two up to 8192 keys; four
    of 32,768 lose, and a CUDA graph serves long and short.
    """
    held = heads.d in HEAD_DIMS and heads.dtype in DTYPES and lengths.is_cuda
    held &= heads.queries <= fa3_chain.MOST_GROUP * heads.keys
    chunks = chunks_of(longest, CHUNKS[heads.d])
    held &= chunks <= _MOST_CHUNKS
    few = len(lengths) * heads.keys <= (_PAIRS if chunks == 1 else _PAIRS_OF_CHUNKS)
    return Few(chunks) if held and few else None


@cache
def _factors(scale: float) -> tuple[float, float]:
    """What turns a score into a power of two, and into one of e; fp32, as FA3 rounds them."""
    log2 = np.float32(float(np.float32(scale)) * math.log2(math.e))
    return float(log2), float(log2 * np.float32(math.log(2)))


def decode_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    chunks: int,
    scale: float,
    *,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    chunk: int | None = None,
    blocks: int | None = None,
    launch: fa3_chain.Launch = fa3_chain.LAUNCH,
    exact: bool = False,
) -> torch.Tensor:
    """Attention of one row a request over all its keys -> o [B, H, D].

    chunks  of a request, at most; keys beyond them are not seen
    chunk   keys, by default that of `fa3_chunks`; blocks: thread blocks a key head that score
    exact   a true division and logarithm, for an interpreter: near FA3, not equal
    Raises ValueError on what is not held.
    """
    o = torch.empty_like(q) if out is None else out
    _check(q, k_pool, v_pool, table, lengths, o)
    batch, heads, d = q.shape
    if not batch:
        return o
    groups, n, chunk = k_pool.shape[1], TILES[d], chunk or CHUNKS[d]
    group, longest = heads // groups, min(table.shape[1], chunks * chunk)
    tiles = triton.cdiv(longest, n)
    single = chunks == 1 and sinks is None
    scores, tops, parts, ends = _work(q, tiles * n, tiles, 0 if single else chunks)
    most = blocks or max(1, _SCORE_BLOCKS * multiprocessors(q.device) // (groups * batch))
    log2, log = _factors(scale)
    same = {"H": heads, "PDL": _early(q), "enable_fp_fusion": False}
    fa3_scores_kernel[(groups, min(tiles, most), batch)](
        q, k_pool, table, lengths, scores, tops, q.stride(0), q.stride(1), k_pool.stride(0),
        k_pool.stride(1), table.stride(0), scores.stride(1), longest, GROUP=group, D=d, N=n,
        BLOCK_M=16, num_warps=4, num_stages=2, **same,
    )  # fmt: skip
    how = {"chunks": chunks, "chunk": chunk, "launch": launch}
    fa3_chain.attend(v_pool, table, lengths, scores, tops, parts, ends, o, longest, log2, **how)
    if not single:
        fa3_finish_kernel[(heads, batch)](
            parts, ends, lengths, sinks, o, o.stride(0), o.stride(1), log, longest, chunks,
            D=d, CHUNK=chunk, UNROLL=min(8, triton.next_power_of_2(chunks)),
            SINKS=sinks is not None, EXACT=exact, num_warps=1, launch_pdl=_early(q), **same,
        )  # fmt: skip
    return o


def _early(q: torch.Tensor) -> bool:
    """Whether a kernel may begin before the one ahead of it has ended."""
    return q.is_cuda


def _check(q, k_pool, v_pool, table, lengths, o) -> None:
    """Raise ValueError on what the kernels do not hold."""
    heads, d = check(q, k_pool, v_pool)
    batch, groups, dtype = len(q), k_pool.shape[1], q.dtype
    if d not in HEAD_DIMS or dtype not in DTYPES or heads > fa3_chain.MOST_GROUP * groups:
        raise ValueError(f"no decode in FA3's order for {heads}/{groups} heads of {d} in {dtype}")
    if o.shape != q.shape or o.dtype != dtype:
        raise ValueError(f"o is {tuple(o.shape)} in {o.dtype}, q {tuple(q.shape)} in {dtype}")
    if table.stride(1) != 1 or o.stride(2) != 1:
        raise ValueError("the table and o need stride 1 along their last axis")
    if len(table) != batch or len(lengths) != batch:
        raise ValueError(
            f"{len(table)} rows of the table, {len(lengths)} lengths, {batch} requests"
        )


def _work(q: torch.Tensor, keys: int, tiles: int, chunks: int) -> tuple[torch.Tensor | None, ...]:
    """scores, tops, parts and ends: what the kernels leave for the next one; see the header."""
    batch, heads, d = q.shape
    of_chunks = ((batch, chunks, heads, d), (2, batch, chunks, heads)) if chunks else (None, None)
    shapes = (batch, heads, keys), (batch, heads, tiles), *of_chunks
    return tuple(s and torch.empty(s, dtype=torch.float32, device=q.device) for s in shapes)
