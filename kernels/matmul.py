"""Linear layer:  y[m, n] = sum_k x[m, k] * w[n, k] + bias[n]

Shapes      x [M, K]   w [N, K]   bias [N]   y [M, N]      M tokens, N output and K input features
Dtypes      x, w, bias, y: bf16 | fp16 | fp32, all the same; fp32 accumulator and bias, one rounding
            on store; fp32 products are IEEE fp32, not TF32
Order       one accumulator for each output over ascending k: tiles of `Tile.k` in ascending order,
            and inside a tile the matrix unit's own k steps, ascending
Bits depend on   K, dtype, arch - not on M, N, the tile, the number of warps or stages, or the grid
                 (`linear_proof` proves it on the machine; tests/kernels/test_matmul.py)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sgl_det.kernels.order import ReductionOrder

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How one launch is cut up; every choice gives the same bits.

    m, n, k   output rows, output columns and input features of a tile
    warps     warps of a program
    stages    tiles in flight
    group     row tiles that share the columns of the weight in the cache
    """

    m: int
    n: int
    k: int
    warps: int = 4
    stages: int = 3
    group: int = 8

    @property
    def name(self) -> str:
        return f"triton {self.m}x{self.n}x{self.k} w{self.warps} s{self.stages}"

    def shared_bytes(self, element_size: int) -> int:
        """Shared memory of the operands in flight, in bytes: the compiler needs little more."""
        return self.stages * (self.m + self.n) * self.k * element_size


# The tile whose bits are the canonical ones; it fits every GPU from sm_80 on.
CANONICAL = {2: Tile(m=64, n=64, k=64), 4: Tile(m=32, n=32, k=32)}


def reduction_order(*, n: int, k: int, dtype: torch.dtype, arch: int) -> ReductionOrder:
    """One accumulator over ascending k, whatever the shape. ValueError on another dtype."""
    if dtype not in DTYPES:
        raise ValueError(f"no matmul order for {dtype}; there are {', '.join(map(str, DTYPES))}")
    return ReductionOrder(axis="K", block=16 if dtype.itemsize == 2 else 1)


@triton.jit(do_not_specialize=["M"])
def _matmul_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    M,
    N,
    K,
    stride_xm,
    stride_wn,
    stride_ym,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first_m = pid // (GROUP_M * tiles_n) * GROUP_M
    group_m = min(tiles_m - first_m, GROUP_M)
    in_group = pid % (GROUP_M * tiles_n)
    rm = (first_m + in_group % group_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = in_group // group_m * BLOCK_N + tl.arange(0, BLOCK_N)
    rk = tl.arange(0, BLOCK_K)
    rows = rm < M
    # Columns beyond the last read row 0 of the weight: cheaper than a mask, and never stored.
    wn = tl.where(rn < N, rn, 0)
    x_ptrs = x_ptr + rm.to(tl.int64)[:, None] * stride_xm + rk[None, :]  # [BLOCK_M, BLOCK_K]
    w_ptrs = w_ptr + wn.to(tl.int64)[:, None] * stride_wn + rk[None, :]  # [BLOCK_N, BLOCK_K]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs, mask=rows[:, None], other=0.0)
            w = tl.load(w_ptrs)
        else:
            inside = rk[None, :] < K - k
            x = tl.load(x_ptrs, mask=rows[:, None] & inside, other=0.0)
            w = tl.load(w_ptrs, mask=inside, other=0.0)
        acc = tl.dot(x, w.T, acc, input_precision=PRECISION)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    if HAS_BIAS:
        acc += tl.load(bias_ptr + wn).to(tl.float32)[None, :]
    y_ptrs = y_ptr + rm.to(tl.int64)[:, None] * stride_ym + rn[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=rows[:, None] & (rn < N)[None, :])


def check_operands(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise ValueError unless shapes and dtypes are those of the header and K has stride 1."""
    k, (n, wk) = x.shape[1], weight.shape
    if wk != k or (bias is not None and bias.shape != (n,)):
        raise ValueError(
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and bias "
            f"{None if bias is None else tuple(bias.shape)} do not fit [M, K], [N, K], [N]"
        )
    dtypes = {x.dtype, weight.dtype, *(() if bias is None else (bias.dtype,))}
    if len(dtypes) != 1 or x.dtype not in DTYPES:
        raise ValueError(f"the dtypes are {sorted(map(str, dtypes))}, expected one of {DTYPES}")
    # An axis of one element, or of none, may have any stride.
    gaps = n > 0 and k > 1 and weight.stride(1) != 1
    if gaps or (bias is not None and n > 1 and bias.stride(0) != 1):
        raise ValueError(f"the weight has strides {weight.stride()}, expected 1 along K")


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x with stride 1 along K: as it is, or copied. One row and many take the same kernel."""
    return x if x.stride(1) == 1 else x.contiguous()


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tile: Tile | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The linear layer of the header, with the canonical tile unless another is given.

    ``out`` may be any [M, N] tensor of x's dtype, or of fp32, with stride 1 along N. Raises
    ValueError on shapes, dtypes or strides that the kernel does not hold.
    """
    check_operands(x, weight, bias)
    x = rows_of(x)
    (m, k), n = x.shape, len(weight)
    y = x.new_empty((m, n)) if out is None else out
    held = y.dtype in (x.dtype, torch.float32) and (n == 1 or y.stride(1) == 1)
    if y.shape != (m, n) or not held:
        raise ValueError(f"out is {tuple(y.shape)} {y.dtype}, expected {(m, n)} {x.dtype}")
    if not m or not n:
        return y
    tile = tile or CANONICAL[x.element_size()]
    grid = (triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n),)
    _matmul_kernel[grid](
        x,
        weight,
        bias,
        y,
        m,
        n,
        k,
        x.stride(0),
        weight.stride(0),
        y.stride(0),
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        GROUP_M=tile.group,
        EVEN_K=k % tile.k == 0,
        HAS_BIAS=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y
