"""The order of causal self-attention, and the pieces of which every kernel of it is made

o[i, h] = sum_s p[s] v[s, h'] / sum_s p[s],   p[s] = exp(q[i, h] . k[s, h'] * scale - max)

Shapes      q, o [T, H, D]   k, v [slots, G, D]; query head h reads key head h' = h // (H / G)
Dtypes      q, k, v, o: bf16 | fp16, all the same; scores, maxima, sums and accumulators in fp32
Order       Keys lie at absolute positions 0, 1, 2, ... A split is SPLIT keys from a multiple of
            SPLIT, a tile so many as `tile` says from a multiple of that. Inside a split the tiles
            are taken in ascending order with a running maximum; splits are merged in ascending
            order. The sum of p is taken by the matrix unit, like p v, so it follows no layout.
Bits depend on   D, dtype, the tile, SPLIT and the row's own position - not on the other rows, the
                 phase, the chunk, the query tile, the grid, the warps or where the keys lie

A tile or split that a row does not see is an exact no-op: the rescaling factor is exp2(0), where
values are finite, as they are assumed to be. Fusing
of products and sums is switched off at launch, so that no compiler decides where to round.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sgl_det.kernels.order import ReductionOrder

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 80, 96, 128, 256)
# Keys a tile at most, and a split. Tiles of 128 need the shared memory of _LARGE.
BLOCK_S, SPLIT = 128, 512
_LARGE = (90, 100, 101, 103)


def reduction_order(*, d: int, dtype: torch.dtype, arch: int) -> ReductionOrder:
    """The order of one row. Raises ValueError on a head size or dtype that is not held."""
    if d not in HEAD_DIMS or dtype not in DTYPES:
        raise ValueError(f"no attention order for heads of {d} in {dtype}; there are {HEAD_DIMS}")
    return ReductionOrder(axis="S", block=tile(d, arch), split=SPLIT)


@dataclass(frozen=True, slots=True)
class Order:
    """What a caller may ask for: keys a tile and a split, and how the result is normalised.

    reciprocal   by the GPU's approximate reciprocal, as FlashInfer does it, and not by division
    """

    block: int
    split: int
    reciprocal: bool = False


def own(d: int, device: torch.device) -> Order:
    """The order of the Triton backend for heads of ``d``."""
    return Order(tile(d, arch_of(device)), SPLIT)


def tile(d: int, arch: int) -> int:
    """Keys a tile for heads of ``d`` on sm_``arch``; padded heads would need too many registers."""
    return BLOCK_S if d in (64, 128) and arch in _LARGE else min(BLOCK_S, 64)


@functools.cache
def arch_of(device: torch.device) -> int:
    """The arch of a device; an interpreter's is Hopper."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@triton.jit
def capped(s, scale, cap):
    """cap * tanh(s * scale / cap), fp32, by exp2."""
    x = tl.minimum(tl.maximum(s * (scale / cap), -30.0), 30.0)
    e = tl.exp2(x * 2.8853900817779268)
    return tl.div_rn(e - 1.0, e + 1.0) * cap


@triton.jit
def log2_of(scale, CAP: tl.constexpr):
    """What turns a score, or a capped one, into a power of two."""
    return 1.4426950408889634 if CAP else scale * 1.4426950408889634


@triton.jit
def one_tile(
    top, total, acc, q, k_ptr, v_ptr, table_ptr, moved_ptr, stride_k, stride_v, first, low, hi,
    position, scale, cap, window, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, MOVED: tl.constexpr,
):  # fmt: skip
    """Take the keys of one tile, from ``first``; those before ``low`` and from ``hi`` are gone.

    top [M], total [M, 16] (equal columns), acc [M, D]: maximum, sum and values of the split so far.
    Every row sees every key unless MASKED.
    """
    rs, rd = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    log2 = log2_of(scale, CAP)
    ones = tl.full((BLOCK_S, 16), 1.0, tl.float32).to(v_ptr.dtype.element_ty)
    s = first + rs
    inside = s < hi
    if WINDOW:
        inside = inside & (s >= low)
    slot = tl.load(table_ptr + s, mask=inside, other=0).to(tl.int64)
    if MOVED:
        slot = tl.load(moved_ptr + slot).to(tl.int64)
    k_at = k_ptr + slot[None, :] * stride_k + rd[:, None]  # [BLOCK_D, BLOCK_S]
    v_at = v_ptr + slot[:, None] * stride_v + rd[None, :]  # [BLOCK_S, BLOCK_D]
    if MASKED:
        k = tl.load(k_at, mask=inside[None, :] & (rd < D)[:, None], other=0.0)
        v = tl.load(v_at, mask=inside[:, None] & (rd < D)[None, :], other=0.0)
    elif D == BLOCK_D:
        k, v = tl.load(k_at), tl.load(v_at)
    else:
        k = tl.load(k_at, mask=(rd < D)[:, None], other=0.0)
        v = tl.load(v_at, mask=(rd < D)[None, :], other=0.0)
    x = tl.dot(q, k)
    if CAP:
        x = capped(x, scale, cap)
    if MASKED:
        seen = inside[None, :] & (s[None, :] <= position[:, None])
        if WINDOW:
            seen = seen & (s[None, :] >= position[:, None] - window)
        x = tl.where(seen, x, float("-inf"))
    higher = tl.maximum(top, tl.max(x, axis=1))
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    p = tl.exp2(tl.fma(x, log2, -(shift * log2)[:, None])).to(v.dtype)
    rescale = tl.exp2((top - shift) * log2)[:, None]
    return higher, tl.dot(p, ones, total * rescale), tl.dot(p, v, acc * rescale)


@triton.jit
def empty(M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Maximum [M], sum [M, 16] and values [M, BLOCK_D] of no key at all."""
    top = tl.full((M,), float("-inf"), tl.float32)
    return top, tl.zeros((M, 16), tl.float32), tl.zeros((M, BLOCK_D), tl.float32)


@triton.jit
def some_tiles(
    top, total, acc, top_s, total_s, acc_s, q, k_ptr, v_ptr, table_ptr, moved_ptr, stride_k,
    stride_v, lo, end, low, hi, position, scale, cap, window, M: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, SPLIT: tl.constexpr, MASKED: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, MOVED: tl.constexpr,
):  # fmt: skip
    """Take the tiles from lo to end, both multiples of BLOCK_S; where a split ends, merge it.

    One loop over all splits, so that loads of the next one are under way while the last is merged.
    """
    for first in range(lo, end, BLOCK_S):
        top_s, total_s, acc_s = one_tile(
            top_s, total_s, acc_s, q, k_ptr, v_ptr, table_ptr, moved_ptr, stride_k, stride_v,
            first, low, hi, position, scale, cap, window, D, BLOCK_D, BLOCK_S, MASKED, WINDOW,
            CAP, MOVED,
        )  # fmt: skip
        if (first + BLOCK_S) % SPLIT == 0:
            log2 = log2_of(scale, CAP)
            top, total, acc = merged(top, total, acc, top_s, total_s, acc_s, log2)
            top_s, total_s, acc_s = empty(M, BLOCK_D)
    return top, total, acc, top_s, total_s, acc_s


@triton.jit
def merged(top, total, acc, top_s, total_s, acc_s, log2):
    """What was merged so far, with the next split: tops [M], totals [M, 1 or 16], acc [M, D]."""
    higher = tl.maximum(top, top_s)
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    a, b = tl.exp2((top - shift) * log2)[:, None], tl.exp2((top_s - shift) * log2)[:, None]
    return higher, total * a + total_s * b, acc * a + acc_s * b


@triton.jit
def with_sink(top, total, acc, sink):
    """Add the attention sink: a key of score ``sink`` [M] with value 0; top, sink as exponents."""
    higher = tl.maximum(top, sink)
    a = tl.exp2(top - higher)[:, None]
    return higher, total * a + tl.exp2(sink - higher)[:, None], acc * a


@triton.jit
def finish(
    top, one, acc, log2, t, h, valid, o_ptr, lse_ptr, sinks_ptr, stride_ot, stride_oh,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SINKS: tl.constexpr,
    LSE: tl.constexpr, RECIPROCAL: tl.constexpr,
):  # fmt: skip
    """top [M], one [M, 1], acc [M, D] of tokens t [M] and heads h [M] -> o and lse, where valid.

    RECIPROCAL: by the GPU's approximate reciprocal, as FlashInfer does it, and not by division.
    """
    rd = tl.arange(0, BLOCK_D)
    top = top * log2
    if SINKS:
        sink = tl.load(sinks_ptr + h, mask=valid, other=0.0).to(tl.float32)
        top, one, acc = with_sink(top, one, acc, sink * 1.4426950408889634)
    # A split that a row does not see turns -0.0 into 0.0, so no row keeps a -0.0.
    if RECIPROCAL:
        once = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [one], dtype=tl.float32, is_pure=True, pack=1
        )
        o = ((acc + 0.0) * once).to(o_ptr.dtype.element_ty)
    else:
        o = tl.div_rn(acc + 0.0, one).to(o_ptr.dtype.element_ty)
    at = o_ptr + t.to(tl.int64)[:, None] * stride_ot + h[:, None] * stride_oh + rd[None, :]
    tl.store(at, o, mask=valid[:, None] & (rd < D)[None, :])
    if LSE:
        lse = (top[:, None] + tl.log2(one)) * 0.6931471805599453
        tl.store(lse_ptr + t.to(tl.int64)[:, None] * H + h[:, None], lse, mask=valid[:, None])
