"""Linear layer with TMA, for many rows or few columns:  y[m, n] = sum_k x[m, k] * w[n, k] + bias[n]

Shapes      x [M, K]   w [N, K]   bias [N]   y [M, N]
Dtypes      x, w, bias, y: bf16 | fp16, all the same; fp32 accumulator, one rounding on store
Order       that of `matmul`: one accumulator for each output over ascending k
Bits depend on   K, dtype, arch - not on M, N, the tile, or the number of programs
Needs       sm_90 or later; rows of x, w and y that start at multiples of 16 bytes
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from sgl_det.kernels.matmul import Tile, check_operands, rows_of

TILES = (
    Tile(m=128, n=256, k=64, warps=8, stages=3),
    Tile(m=128, n=128, k=64, warps=8, stages=4),
    Tile(m=64, n=256, k=64, warps=4, stages=4),
)
# For layers so narrow that few programs have work: a tile of few columns, fetched without the help
# of the threads that multiply.
NARROW = (Tile(m=64, n=16, k=256, stages=4), Tile(m=64, n=32, k=256, stages=4))


@triton.jit(do_not_specialize=["M"])
def _matmul_tma_kernel(
    x_desc,
    w_desc,
    y_desc,
    bias_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PROGRAMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    tiles_m, tiles_n, tiles_k = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        first_m = tile // (GROUP_M * tiles_n) * GROUP_M
        group_m = min(tiles_m - first_m, GROUP_M)
        in_group = tile % (GROUP_M * tiles_n)
        m0 = (first_m + in_group % group_m) * BLOCK_M
        n0 = in_group // group_m * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for i in range(tiles_k):
            x = x_desc.load([m0, i * BLOCK_K])  # [BLOCK_M, BLOCK_K]
            w = w_desc.load([n0, i * BLOCK_K])  # [BLOCK_N, BLOCK_K]
            acc = tl.dot(x, w.T, acc)
        if HAS_BIAS:
            rn = n0 + tl.arange(0, BLOCK_N)
            acc += tl.load(bias_ptr + rn, mask=rn < N, other=0.0).to(tl.float32)[None, :]
        y_desc.store([m0, n0], acc.to(y_desc.dtype))


def shared_bytes(tile: Tile) -> int:
    """Shared memory of the operands in flight and of the result, which leaves through it too."""
    return tile.shared_bytes(2) + tile.m * tile.n * 2


def holds(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel takes these operands: 16 bits, rows at multiples of 16 bytes."""
    aligned = all(t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0 for t in (x, weight))
    return x.element_size() == 2 and aligned and len(weight) % 8 == 0


def matmul_tma(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tile: Tile = TILES[0],
    programs: int | None = None,
) -> torch.Tensor:
    """The linear layer of the header. ``programs``: how many run at once, one a multiprocessor.

    Raises ValueError on operands that the kernel does not hold.
    """
    check_operands(x, weight, bias)
    x = rows_of(x)
    if not holds(x, weight):
        raise ValueError(
            f"x {x.stride()} and weight {weight.stride()} ({x.dtype}): rows must start at "
            f"multiples of 16 bytes, with 16-bit elements; use matmul"
        )
    (m, k), n = x.shape, len(weight)
    y = x.new_empty((m, n))
    if not m:
        return y
    if programs is None:
        programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    tiles = triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n)
    _matmul_tma_kernel[(min(programs, tiles),)](
        TensorDescriptor.from_tensor(x, [tile.m, tile.k]),
        TensorDescriptor.from_tensor(weight, [tile.n, tile.k]),
        TensorDescriptor.from_tensor(y, [tile.m, tile.n]),
        bias,
        m,
        n,
        k,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        GROUP_M=tile.group,
        PROGRAMS=min(programs, tiles),
        HAS_BIAS=bias is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y
