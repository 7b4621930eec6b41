"""The order of attention that each backend's patches hold, for the numerics key.

Nothing here is asked of a backend: `sgl_det.patches` make it hold, and a proof or the checks in
``benchmarks`` show that it does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def in_use(backend: str, *, d: int, dtype: torch.dtype, arch: int) -> dict[str, str]:
    """What decides the bits of attention beside its inputs; d: the head size.

    Raises ValueError on a head size, dtype or GPU for which the backend has no order.
    """
    find = _ORDERS.get(backend)
    return {} if find is None else find(d, dtype, arch)


def _triton(d: int, dtype: torch.dtype, arch: int) -> dict[str, str]:
    from sgl_det.kernels.attention_order import reduction_order

    return {"attention": str(reduction_order(d=d, dtype=dtype, arch=arch))}


def _fa3(d: int, dtype: torch.dtype, arch: int) -> dict[str, str]:
    from sgl_det.kernels.fa3_chunks import reduction_order

    return {"attention": str(reduction_order(d=d, dtype=dtype, arch=arch))}


def _flashinfer(d: int, dtype: torch.dtype, arch: int) -> dict[str, str]:
    from sgl_det.kernels.flashinfer_headers import EDITS, digits
    from sgl_det.kernels.flashinfer_order import reduction_order

    order = reduction_order(d=d, dtype=dtype, arch=arch)
    return {"attention": str(order), "attention_headers": digits(EDITS)}


_ORDERS: dict[str, Callable[[int, torch.dtype, int], dict[str, str]]] = {
    "triton": _triton,
    "fa3": _fa3,
    "flashinfer": _flashinfer,
}
