"""The order of attention with FlashInfer: that of its FA2 kernel in one pass, and beyond it ours.

FlashInfer's kernel, built from `flashinfer_headers`, takes all keys of a request in tiles of 64. Up
to SPLIT keys that is one split of `attention_order`, whose kernels give the same bits: they decode,
and they take the requests that are longer.
"""

from __future__ import annotations

import torch

from sgl_det.kernels.attention_order import Order
from sgl_det.kernels.order import ReductionOrder

# With splits of 1024 keys a lone request's decode of 2048 to 8192 took almost twice the time.
KV_TILE, SPLIT = 64, 512
HEAD_DIMS, DTYPES = (64, 128, 256), (torch.bfloat16, torch.float16)
ORDER = Order(KV_TILE, SPLIT, reciprocal=True)


def reduction_order(*, d: int, dtype: torch.dtype, arch: int) -> ReductionOrder:
    """The order of one row. Raises ValueError on a head size, dtype or GPU that is not held."""
    if d not in HEAD_DIMS or dtype not in DTYPES or arch < 80:
        raise ValueError(f"no order for heads of {d} in {dtype} on sm_{arch} with FlashInfer")
    return ReductionOrder(axis="S", block=KV_TILE, split=SPLIT)
