"""The order of FlashInfer's FA2 kernel, as `flashinfer_plan` and `flashinfer_headers` make it."""

from __future__ import annotations

import torch

from sgl_det.kernels.order import ReductionOrder

SPLIT = 1024  # KV tokens a split, in every phase
KV_TILE = 64  # of every query tile, in a kernel built from `flashinfer_headers`
HEAD_DIMS, DTYPES = (64, 128, 256), (torch.bfloat16, torch.float16)


def reduction_order(*, d: int, dtype: torch.dtype, arch: int) -> ReductionOrder:
    """The order of one row. Raises ValueError on a head size or dtype that is not held."""
    if d not in HEAD_DIMS or dtype not in DTYPES or arch < 80:
        raise ValueError(f"no order for heads of {d} in {dtype} on sm_{arch} with FlashInfer")
    return ReductionOrder(axis="S", block=KV_TILE, split=SPLIT)
