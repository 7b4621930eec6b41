"""Batched product:  y[i, m, n] = sum_k a[i, m, k] * b[i, k, n]

Shapes      a [L, M, K]   b [L, K, N]   y [L, M, N]
Dtypes      a, b, y: bf16 | fp16 | fp32, all the same; fp32 accumulator, one rounding on store
Order       one accumulator for each output over ascending k, as in `matmul`
Bits depend on   K, dtype, arch - not on L, M, N, the tile, the strides, or the other matrices
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_det.kernels.matmul import CANONICAL, DTYPES


@triton.jit
def _bmm_kernel(
    a_ptr,
    b_ptr,
    y_ptr,
    M,
    N,
    K,
    stride_al,
    stride_am,
    stride_ak,
    stride_bl,
    stride_bk,
    stride_bn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid, which = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tiles_n = tl.cdiv(N, BLOCK_N)
    rm = pid // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rk = tl.arange(0, BLOCK_K).to(tl.int64)
    a_rows = a_ptr + which * stride_al + rm.to(tl.int64)[:, None] * stride_am
    b_columns = b_ptr + which * stride_bl + rn.to(tl.int64)[None, :] * stride_bn
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        inside = rk < K - k
        a_mask = (rm < M)[:, None] & inside[None, :]
        b_mask = inside[:, None] & (rn < N)[None, :]
        a = tl.load(a_rows + (k + rk)[None, :] * stride_ak, mask=a_mask, other=0.0)
        b = tl.load(b_columns + (k + rk)[:, None] * stride_bk, mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    y_ptrs = y_ptr + which * M * N + rm.to(tl.int64)[:, None] * N + rn[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=(rm < M)[:, None] & (rn < N)[None, :])


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product of the header, for any strides. ValueError on what does not fit."""
    if a.dim() != 3 or b.dim() != 3 or len(a) != len(b) or a.shape[2] != b.shape[1]:
        raise ValueError(
            f"a {tuple(a.shape)} and b {tuple(b.shape)} do not fit [L, M, K], [L, K, N]"
        )
    if a.dtype not in DTYPES or b.dtype != a.dtype:
        raise ValueError(f"the dtypes are {a.dtype} and {b.dtype}, expected one of {DTYPES}")
    (many, m, k), n = a.shape, b.shape[2]
    y = a.new_empty((many, m, n))
    if not y.numel():
        return y
    tile = CANONICAL[a.element_size()]
    grid = (triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n), many)
    _bmm_kernel[grid](
        a,
        b,
        y,
        m,
        n,
        k,
        *a.stride(),
        *b.stride(),
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        PRECISION="ieee" if a.dtype == torch.float32 else None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y
