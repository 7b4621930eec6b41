"""Attention over keys cut into chunks, from what a kernel gave for each chunk alone

o[t, h] = sum_j w_j o_j[t, h] / sum_j w_j,   lse[t, h] = max + log(sum_j w_j),
w_j = exp(lse_j[t, h] - max)

Shapes      parts [R, H, D] and parts_lse [H, R], as FlashAttention-3 gives them: chunk j of row t
            is row first[t] + j * step[t] of them, for j < count[t]; first, step, count [T]
            o [T, H, D]   lse [H, T]   sinks [H]   state: acc [T, H, D], top and total [T, H]
Dtypes      parts, o: bf16 | fp16, the same; sinks bf16 | fp16 | fp32; first, step, count int32;
            everything else fp32
Order       A row starts with what an earlier launch left in the state, takes its chunks in
            ascending order with a running maximum, then the last chunk, which lies in o and lse
            itself, then the sink: a key with the value 0. One rounding, on store.
Bits depend on   the row's own chunks - not on T, R, how the chunks are spread over launches,
                 BLOCK_H, UNROLL, the grid or the warps

A chunk in which a row has no key (lse -inf) is an exact no-op, so a row of one chunk is that chunk,
bit for bit. Fusing of products and sums is switched off at launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

DTYPES = (torch.bfloat16, torch.float16)
_LOG2_E, _LN_2 = 1.4426950408889634, 0.6931471805599453
# Any values give the same bits: chunks in flight, and rows from which a program takes eight heads
# and two chunks at once, since then there are programs enough.
UNROLL, MANY = 8, 1024


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the chunks of each row lie in ``parts``: first, step and count, int32 [T]."""

    first: torch.Tensor
    step: torch.Tensor
    count: torch.Tensor

    @classmethod
    def none(cls, rows: int, device: torch.device) -> Rows:
        """Rows that have no chunk in ``parts``."""
        return cls(*torch.zeros((3, rows), dtype=torch.int32, device=device))


@dataclass(frozen=True, slots=True)
class State:
    """What several launches hand on: the maximum and sum of the weights, and the values, so far."""

    top: torch.Tensor
    total: torch.Tensor
    acc: torch.Tensor

    @classmethod
    def allocate(cls, rows: int, heads: int, d: int, device: torch.device) -> State:
        """The state of rows that have seen no chunk: where top is -inf the rest is not read."""
        top = torch.full((rows, heads), float("-inf"), device=device)
        return cls(top, torch.empty_like(top), torch.empty((rows, heads, d), device=device))


@triton.jit
def take(top, total, acc, lse, o):
    """top, total, lse [H], acc, o [H, D] -> the first three with one more chunk."""
    empty, seen = top == float("-inf"), lse != float("-inf")
    higher = tl.where(empty, lse, tl.maximum(top, lse))
    a = tl.exp2((top - higher) * 1.4426950408889634)
    b = tl.exp2((lse - higher) * 1.4426950408889634)
    sums = tl.where(empty, 1.0, total * a + b)
    values = tl.where(empty[:, None], o, acc * a[:, None] + o * b[:, None])
    return (
        tl.where(seen, higher, top),
        tl.where(seen, sums, total),
        tl.where(seen[:, None], values, acc),
    )


@triton.jit
def _merge_chunks_kernel(
    parts_ptr, parts_lse_ptr, first_ptr, step_ptr, count_ptr, top_ptr, total_ptr, acc_ptr,
    o_ptr, lse_ptr, sinks_ptr,
    stride_pr, stride_ph, stride_plh, stride_ot, stride_oh, stride_lh,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
    UNROLL: tl.constexpr, STATE: tl.constexpr, FINAL: tl.constexpr, LAST: tl.constexpr,
    SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    t64 = t.to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    valid = h < H
    inside = valid[:, None] & (d < D)[None, :]
    count = tl.load(count_ptr + t)
    # No chunk here: the state stays as it is, and so does a last chunk that is the only one.
    if not FINAL or (LAST and not STATE and not SINKS):
        if count == 0:
            return
    top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    scalar, row = t64 * H + h, (t64 * H + h)[:, None] * D + d[None, :]
    if STATE:
        top = tl.load(top_ptr + scalar, mask=valid, other=float("-inf"))
        total = tl.load(total_ptr + scalar, mask=valid, other=0.0)
        acc = tl.load(acc_ptr + row, mask=inside, other=0.0)
    first, step = tl.load(first_ptr + t).to(tl.int64), tl.load(step_ptr + t).to(tl.int64)
    for begin in range(0, count, UNROLL):
        for i in tl.static_range(UNROLL):
            there = begin + i < count
            r = first + (begin + i) * step
            one = tl.load(
                parts_lse_ptr + h * stride_plh + r, mask=valid & there, other=float("-inf")
            )
            at = parts_ptr + r * stride_pr + h[:, None] * stride_ph + d[None, :]
            o = tl.load(at, mask=inside & there, other=0.0).to(tl.float32)
            top, total, acc = take(top, total, acc, one, o)
    o_at = o_ptr + t64 * stride_ot + h[:, None] * stride_oh + d[None, :]
    lse_at = lse_ptr + h * stride_lh + t if LSE or LAST else lse_ptr
    if LAST:
        one = tl.load(lse_at, mask=valid, other=float("-inf"))
        o = tl.load(o_at, mask=inside, other=0.0).to(tl.float32)
        top, total, acc = take(top, total, acc, one, o)
    if FINAL:
        if SINKS:
            sink = tl.load(sinks_ptr + h, mask=valid, other=0.0).to(tl.float32)
            top, total, acc = take(top, total, acc, sink, tl.zeros_like(acc))
        empty = top == float("-inf")
        divisor = tl.where(empty, 1.0, total)
        o = tl.where(empty[:, None], 0.0, tl.div_rn(acc, divisor[:, None]))
        tl.store(o_at, o.to(o_ptr.dtype.element_ty), mask=inside)
        if LSE:
            above = tl.log2(divisor) * 0.6931471805599453
            tl.store(lse_at, tl.where(divisor == 1.0, top, top + above), mask=valid)
    else:
        tl.store(top_ptr + scalar, top, mask=valid)
        tl.store(total_ptr + scalar, total, mask=valid)
        tl.store(acc_ptr + row, acc, mask=inside)


def merge_chunks(
    parts: torch.Tensor,
    parts_lse: torch.Tensor,
    rows: Rows,
    *,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    last: bool = False,
    sinks: torch.Tensor | None = None,
    state: State | None = None,
    final: bool = True,
) -> torch.Tensor:
    """The merge of the header, into ``out`` and, where given, ``lse``; returns ``out``.

    last    ``out`` and ``lse`` hold the last chunk of every row, and are replaced by the result
    state   what earlier launches left; the launch that is not ``final`` leaves its own there
    Raises ValueError on shapes, dtypes or strides other than the header's.
    """
    _check(parts, parts_lse, rows, out, lse, last, state, final)
    tokens, heads, d = out.shape
    if not tokens:
        return out
    block_d = triton.next_power_of_2(d)
    few = tokens < MANY
    block_h = 1 if few else min(8, triton.next_power_of_2(heads))
    kept = (None, None, None) if state is None else (state.top, state.total, state.acc)
    _merge_chunks_kernel[(tokens, triton.cdiv(heads, block_h))](
        parts, parts_lse, rows.first, rows.step, rows.count, *kept, out, lse, sinks,
        parts.stride(0), parts.stride(1), parts_lse.stride(0), out.stride(0), out.stride(1),
        0 if lse is None else lse.stride(0), H=heads, D=d, BLOCK_D=block_d, BLOCK_H=block_h,
        UNROLL=UNROLL if few else min(UNROLL, 2), STATE=state is not None, FINAL=final,
        LAST=last and final, SINKS=sinks is not None, LSE=lse is not None,
        num_warps=_warps(block_h * block_d), enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _warps(elements: int) -> int:
    """Warps of a program: any number gives the same bits."""
    return min(4, max(1, elements // 128))


def _check(parts, parts_lse, rows, out, lse, last, state, final) -> None:
    """Raise ValueError on what the kernel does not hold."""
    tokens, heads, d = out.shape if out.dim() == 3 else (0, 0, 0)
    if parts.shape[1:] != out.shape[1:] or out.dim() != 3 or parts.dim() != 3:
        raise ValueError(
            f"parts {tuple(parts.shape)} and o {tuple(out.shape)} do not fit; expected "
            "[R, H, D] and [T, H, D]"
        )
    if out.dtype not in DTYPES or parts.dtype != out.dtype:
        raise ValueError(f"parts in {parts.dtype}, o in {out.dtype}; expected one of {DTYPES}")
    for name, x, shape in (("parts", parts_lse, (heads, len(parts))), ("o", lse, (heads, tokens))):
        if x is not None and (x.shape != shape or x.dtype != torch.float32 or x.stride(1) != 1):
            raise ValueError(
                f"the lse of {name} is {tuple(x.shape)} in {x.dtype}, expected {shape} in "
                "float32 with stride 1 along the rows"
            )
    if parts.stride(2) != 1 or out.stride(2) != 1:
        raise ValueError("parts and o must have stride 1 along D")
    if any(len(x) != tokens or x.dtype != torch.int32 for x in (rows.first, rows.step, rows.count)):
        raise ValueError(f"first, step and count must be int32 [{tokens}], one for each row of o")
    if last and lse is None:
        raise ValueError("the last chunk in o needs its lse")
    if state is None and not final:
        raise ValueError("a launch that is not final needs a state to leave its result in")
    if state is not None and state.acc.shape != (tokens, heads, d):
        raise ValueError(f"the state holds {tuple(state.acc.shape)}, expected {(tokens, heads, d)}")


def reference(
    parts, parts_lse, rows, *, out, lse=None, last=False, sinks=None, state=None, final=True
) -> torch.Tensor:
    """`merge_chunks` in PyTorch, on any device; near it, since each device has its own exp2."""
    tokens, heads, d = out.shape
    kept = state or State.allocate(tokens, heads, d, out.device)
    top, total, acc = kept.top.clone(), kept.total.clone(), kept.acc.clone()
    for j in range(int(rows.count.max()) if tokens else 0):
        r = torch.where(j < rows.count, rows.first + j * rows.step, 0).long()
        one = torch.where((j < rows.count)[:, None], parts_lse.T[r], float("-inf"))
        top, total, acc = _take(top, total, acc, one, parts[r].float())
    if not final:
        for old, new in ((state.top, top), (state.total, total), (state.acc, acc)):
            old.copy_(new)
        return out
    if last:
        top, total, acc = _take(top, total, acc, lse.T, out.float())
    if sinks is not None:
        sink = sinks.float().expand(tokens, heads)
        top, total, acc = _take(top, total, acc, sink, torch.zeros_like(acc))
    empty = top == float("-inf")
    divisor = torch.where(empty, 1.0, total)
    out.copy_(torch.where(empty[..., None], 0.0, acc / divisor[..., None]))
    if lse is not None:
        above = torch.log2(divisor.double()).float() * _LN_2
        lse.copy_(torch.where(divisor == 1.0, top, top + above).T)
    return out


def _take(top, total, acc, lse, o):
    """`take` for tensors [T, H] and [T, H, D]."""
    empty, seen = top == float("-inf"), lse != float("-inf")
    higher = torch.where(empty, lse, torch.fmax(top, lse))
    # In fp64, whose last digit may follow the place in a vector register; fp32's does not see it.
    a, b = (torch.exp2(((x - higher) * _LOG2_E).double()).float() for x in (top, lse))
    sums = torch.where(empty, 1.0, total * a + b)
    values = torch.where(empty[..., None], o, acc * a[..., None] + o * b[..., None])
    return (
        torch.where(seen, higher, top),
        torch.where(seen, sums, total),
        torch.where(seen[..., None], values, acc),
    )
