"""How many programs of our decode kernel share a request, and the memory that they need for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgl_det.kernels.attention_decode import Work
    from sgl_det.kernels.attention_order import Order

# Memory for splits which several programs share, in bytes.
WORK_BYTES = 256 << 20


def work_for(heads: int, groups: int, d: int, longest: int, order: Order, device: Any) -> Work:
    """Memory for as many requests as several programs may share, within `WORK_BYTES`."""
    from sgl_det.kernels.attention_decode import Work, programs_for

    sizes = (heads, longest, d)
    most = max(1, programs_for(order.block, device) // groups)
    batch = max(1, min(most, WORK_BYTES // Work.bytes_of(1, *sizes, order.split)))
    return Work.allocate(batch, *sizes, device, order.split)


def shared(work: Work, batch: int, groups: int, order: Order) -> int:
    """Programs for each request and key head: a GPU's worth of them, one where memory is short."""
    from sgl_det.kernels.attention_decode import programs_for

    heads, splits, d = work.parts.shape[1:]
    if not work.holds(batch, heads, d):
        return 1
    programs = programs_for(order.block, work.parts.device)
    return max(1, min(splits, programs // max(1, batch * groups)))
