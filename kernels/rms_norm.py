"""RMSNorm:  y[t, d] = h[t, d] / sqrt(mean_d(h[t, :] ** 2) + eps) * w[d]

h = x, or x + residual in fp32; then residual becomes h rounded, and y is made from the unrounded h
(as in FlashInfer and sgl_kernel). Gemma multiplies by 1 + w.

Shapes      x, residual, y [T, D]   w [D]   q [T, H, D]   k [T, G, D]      D <= 16384, stride 1;
            T tokens, H and G heads: any strides
Dtypes      x, residual, w, y: bf16 | fp16 | fp32; all arithmetic in fp32, one rounding on store
Order       element i belongs to lane i mod LANES; a lane adds its squares in ascending order, the
            lanes are added in a tree, neighbours first; root and both quotients correctly rounded
Bits depend on   D - not on T, H, strides, alignment, num_warps, rows a program or the GPU
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_det.kernels.order import ReductionOrder
from sgl_det.kernels.row_sum import DTYPES, rows_a_program, tree_sum, warps

_MOST = 16384
_MANY = 4096  # rows from which programs share them; any number gives the same bits
_PROGRAMS = 1280  # of heads, about ten a multiprocessor of an H200
_MOST_HEAD = 1024


def reduction_order(*, d: int, dtype: torch.dtype, arch: int | None = None) -> ReductionOrder:
    """The order of a row of ``d`` elements. Raises ValueError on a size or dtype not held."""
    if dtype not in DTYPES or not 1 <= d <= _MOST:
        raise ValueError(f"no reduction order for rows of {d} elements of {dtype}")
    if d <= 2048:
        block = triton.next_power_of_2(d)
    elif d > 8192:
        block = 2048
    else:
        # The tile that leaves fewer lanes idle; of two equals the wider.
        block = min((2048, 1024), key=lambda b: triton.cdiv(d, b) * b)
    return ReductionOrder(axis="D", block=block, lanes=block)


@triton.jit
def _scale(squares, eps, D: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    mean = tl.div_rn(tree_sum(squares, ROWS, LANES), D * 1.0)
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))  # [ROWS]


@triton.jit(do_not_specialize=["T"])
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    w_ptr,
    y_ptr,
    x_stride_t,
    residual_stride_t,
    y_stride_t,
    T,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FUSED_ADD: tl.constexpr,
    GEMMA: tl.constexpr,
):
    TILES: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    t64 = t.to(tl.int64)[:, None]
    squares = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    h_tiles, w_tiles = (), ()
    for i in tl.static_range(TILES):
        d = i * BLOCK_D + tl.arange(0, BLOCK_D)
        mask = (t < T)[:, None] & (d < D)[None, :]
        h = tl.load(x_ptr + t64 * x_stride_t + d[None, :], mask=mask, other=0.0).to(tl.float32)
        # Asked for before the sum, so that the weights arrive while it is formed.
        w_tiles += (tl.load(w_ptr + d, mask=d < D, other=0.0),)
        if FUSED_ADD:
            place = residual_ptr + t64 * residual_stride_t + d[None, :]
            h += tl.load(place, mask=mask, other=0.0).to(tl.float32)
        squares += h * h
        h_tiles += (h,)  # [BLOCK_T, BLOCK_D]
    scale = _scale(squares, eps, D, BLOCK_T, BLOCK_D)
    for i in tl.static_range(TILES):
        d = i * BLOCK_D + tl.arange(0, BLOCK_D)
        mask = (t < T)[:, None] & (d < D)[None, :]
        w = w_tiles[i].to(tl.float32)
        if GEMMA:
            w += 1.0
        if FUSED_ADD:
            place = residual_ptr + t64 * residual_stride_t + d[None, :]
            tl.store(place, h_tiles[i].to(residual_ptr.dtype.element_ty), mask=mask)
        y = h_tiles[i] * scale[:, None] * w[None, :]
        place = y_ptr + t64 * y_stride_t + d[None, :]
        tl.store(place, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _norm_heads(
    x_ptr,
    w_ptr,
    x_stride_t,
    x_stride_h,
    first,
    T,
    eps,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GEMMA: tl.constexpr,
):
    r = first + tl.arange(0, BLOCK_R)
    t = r // H
    d = tl.arange(0, BLOCK_D)
    place = x_ptr + (t.to(tl.int64) * x_stride_t + (r % H) * x_stride_h)[:, None] + d[None, :]
    mask = (t < T)[:, None] & (d < D)[None, :]
    w = tl.load(w_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    x = tl.load(place, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_R, BLOCK_D]
    if GEMMA:
        w += 1.0
    y = x * _scale(x * x, eps, D, BLOCK_R, BLOCK_D)[:, None] * w[None, :]
    tl.store(place, y.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T"])
def _rms_norm_heads_kernel(
    q_ptr,
    k_ptr,
    q_w_ptr,
    k_w_ptr,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    T,
    eps,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GEMMA: tl.constexpr,
):
    q_programs = tl.cdiv(T * H, BLOCK_R)
    i = tl.program_id(0)
    if i < q_programs:
        first = i * BLOCK_R
        _norm_heads(
            q_ptr, q_w_ptr, q_stride_t, q_stride_h, first, T, eps, H, D, BLOCK_D, BLOCK_R, GEMMA
        )
    else:
        first = (i - q_programs) * BLOCK_R
        _norm_heads(
            k_ptr, k_w_ptr, k_stride_t, k_stride_h, first, T, eps, G, D, BLOCK_D, BLOCK_R, GEMMA
        )


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, gemma: bool = False
) -> torch.Tensor:
    """x [..., D], weight [D] -> y of x's shape and dtype, contiguous.

    Raises ValueError on other dtypes, sizes or strides than the header's.
    """
    _check("rms_norm", weight, x)
    rows = x.reshape(-1, x.shape[-1])
    y = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    _launch(rows, None, weight, y, eps, gemma)
    return y.view(x.shape)


def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    gemma: bool = False,
) -> None:
    """In place, for x and residual [T, D]: residual becomes x + residual, x its norm.

    Raises ValueError on other dtypes, sizes or strides than the header's.
    """
    _check("fused_add_rms_norm", weight, x, residual)
    if x.dim() != 2 or residual.shape != x.shape:
        raise ValueError(
            f"fused_add_rms_norm: x is {tuple(x.shape)} and residual {tuple(residual.shape)}, "
            f"expected one shape [T, D]"
        )
    _launch(x, residual, weight, x, eps, gemma)


def rms_norm_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    *,
    gemma: bool = False,
) -> None:
    """In place, for q [T, H, D] and k [T, G, D]: every head becomes its norm. D <= 1024.

    Raises ValueError on other dtypes, sizes or strides than the header's.
    """
    for x, weight in ((q, q_weight), (k, k_weight)):
        _check("rms_norm_heads", weight, x)
    tokens, heads, d = q.shape if q.dim() == 3 else (0, 0, 0)
    if k.dim() != 3 or (k.shape[0], k.shape[2]) != (tokens, d) or d > _MOST_HEAD:
        raise ValueError(
            f"rms_norm_heads: q is {tuple(q.shape)} and k {tuple(k.shape)}, "
            f"expected [T, H, D] and [T, G, D] with D <= {_MOST_HEAD}"
        )
    order = reduction_order(d=d, dtype=q.dtype)
    groups = k.shape[1]
    rows = rows_of_heads(order, tokens * (heads + groups))
    programs = triton.cdiv(tokens * heads, rows) + triton.cdiv(tokens * groups, rows)
    if programs:
        _rms_norm_heads_kernel[(programs,)](
            q,
            k,
            q_weight,
            k_weight,
            *(x.stride(i) if x.shape[i] > 1 else d for x in (q, k) for i in (0, 1)),
            tokens,
            eps,
            H=heads,
            G=groups,
            D=d,
            BLOCK_D=order.block,
            BLOCK_R=rows,
            GEMMA=gemma,
            num_warps=max(1, rows * order.block // 512),
            enable_fp_fusion=False,
        )


def rows_of(order: ReductionOrder, d: int, tokens: int) -> int:
    """Rows a program: long ones have one each, and where there are few, fewer share one."""
    if d > order.block:
        return 1
    most = rows_a_program(order)
    return most if tokens >= _MANY else max(1, most // 2)


def rows_of_heads(order: ReductionOrder, rows: int) -> int:
    """Rows a program: few where there are few, so that they spread over the GPU."""
    spread = triton.next_power_of_2(max(1, triton.cdiv(rows, _PROGRAMS)))
    return min(rows_a_program(order), spread)


def _launch(x, residual, weight, y, eps: float, gemma: bool) -> None:
    """x, y and residual [T, D]; residual None for the plain norm."""
    tokens, d = x.shape
    if not tokens:
        return
    order = reduction_order(d=d, dtype=x.dtype)
    rows = rows_of(order, d, tokens)
    fused = residual is not None
    _rms_norm_kernel[(triton.cdiv(tokens, rows),)](
        x,
        residual if fused else x,
        weight,
        y,
        *(z.stride(0) if tokens > 1 else d for z in (x, residual if fused else x, y)),
        tokens,
        eps,
        D=d,
        BLOCK_D=order.block,
        BLOCK_T=rows,
        FUSED_ADD=fused,
        GEMMA=gemma,
        num_warps=warps(order),
        enable_fp_fusion=False,
    )


def _check(name: str, weight: torch.Tensor, *rows: torch.Tensor) -> None:
    """Raise ValueError unless each of ``rows`` is [..., D] with stride 1 and fits the weight."""
    for x in (weight, *rows):
        if x.dtype not in DTYPES:
            held = ", ".join(str(d) for d in DTYPES)
            raise ValueError(f"{name}: a tensor is {x.dtype}, expected one of {held}")
    d = rows[0].shape[-1] if rows[0].dim() else 0
    if weight.shape != (d,) or not 1 <= d <= _MOST or not weight.is_contiguous():
        raise ValueError(
            f"{name}: weight is {tuple(weight.shape)} for rows of {d} elements, "
            f"expected ({d},), contiguous, 1 to {_MOST}"
        )
    for x in rows:
        if x.dim() < 2 or (x.stride(-1) != 1 and d > 1):
            raise ValueError(
                f"{name}: a tensor is {tuple(x.shape)} with strides {x.stride()}, "
                f"expected [..., D] with stride 1 along D"
            )
