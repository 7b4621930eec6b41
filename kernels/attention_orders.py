"""The order of attention that each backend's patches hold, for the numerics key.

An order says how keys are cut up, not each formula; so the sources of our kernels are in it, too.

Nothing here is asked of a backend: `sgl_det.patches` make it hold, and a proof or the checks in
``benchmarks`` show that it does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch


def in_use(backend: str, *, d: int, dtype: torch.dtype, arch: int) -> dict[str, str]:
    """What decides the bits of attention beside its inputs; d: the head size.

    Raises ValueError on a head size, dtype or GPU for which the backend has no order.
    """
    if backend not in _ORDERS:
        return {}
    find, sources = _ORDERS[backend]
    here = Path(__file__).parent
    text = b"".join((here / name).read_bytes() for name in sources)
    return find(d, dtype, arch) | {"attention_sources": hashlib.sha256(text).hexdigest()[:12]}


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


_OURS = ("attention_order.py", "attention.py", "attention_decode.py")
_FA3 = (
    *("fa3_chain.py", "fa3_chunks.py", "fa3_decode.py", "fa3_decode_kernels.py", "fa3_extend.py"),
    *("cuda/fa3_chain.cu", "cuda/primitives.cuh", "merge_chunks.py", "nvrtc.py"),
)
_Find = Callable[[int, torch.dtype, int], dict[str, str]]
_ORDERS: dict[str, tuple[_Find, tuple[str, ...]]] = {
    "triton": (_triton, _OURS),
    "fa3": (_fa3, _FA3),
    "flashinfer": (_flashinfer, (*_OURS, "flashinfer_order.py")),
}
