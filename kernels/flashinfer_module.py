"""What replaces ``module.plan`` of FlashInfer's FA2 prefill module, which decode uses, too.

Every way of planning in FlashInfer and SGLang ends in that one call of 19 arguments. Ours takes the
order from `SETTINGS`, ignores the splits that are asked for, and sends the image of the plan to the
GPU through pinned memory that is never written while a copy may still read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sgl_det.kernels import flashinfer_plan as planner


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """chunk: KV tokens a split. context, pool: the longest request, and the KV tokens there are.

    The query tiles decide no bits where the kernel is built with `flashinfer_headers.ONE_TREE`:
    ``short`` serves batches with at most 16 packed query rows a request, ``long`` all others.
    Without those edits the two must be equal.
    """

    chunk: int
    context: int
    pool: int
    short: int = 16
    long: int = 128

    def tile(self, rows: int, batch: int, heads: planner.Heads) -> int:
        if rows * heads.group <= 16 * batch:
            return self.short
        return min(self.long, 64) if heads.dim >= 256 else self.long


@dataclass(slots=True)
class Settings:
    """This process's order, set before FlashInfer plans for the first time."""

    order: Order | None = None
    decode: dict[tuple, planner.DecodePlan] = field(default_factory=dict)
    rings: dict[int, Ring] = field(default_factory=dict)


class Ring:
    """Parts of one pinned buffer, taken in turn; an event tells when a part has been read."""

    PARTS = 3

    def __init__(self, pinned: torch.Tensor):
        self.pinned, self.view = pinned, pinned.numpy()
        self.part = pinned.numel() // self.PARTS // 16 * 16
        self.read: list[torch.cuda.Event | None] = [None] * self.PARTS
        self.next = 0

    def send(self, image: np.ndarray, target: torch.Tensor) -> None:
        """Copy the image to the beginning of ``target``, in order with the current stream."""
        size, room = len(image), min(self.pinned.numel(), target.numel())
        if size > room:
            raise planner.WorkspaceTooSmall(
                f"a plan of {size} bytes, expected at most {room}: lower --chunked-prefill-size"
            )
        whole = size > self.part
        parts = range(self.PARTS) if whole else (self.next,)
        for i in parts:
            if self.read[i] is not None:
                self.read[i].synchronize()
        start = 0 if whole else self.next * self.part
        self.view[start : start + size] = image
        target[:size].copy_(self.pinned[start : start + size], non_blocking=True)
        if target.is_cuda:
            event = torch.cuda.Event()
            event.record()
            for i in parts:
                self.read[i] = event
        self.next = (self.next + 1) % self.PARTS


SETTINGS = Settings()


def module_plan(
    float_workspace: torch.Tensor,
    int_workspace: torch.Tensor,
    pinned: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_lens: torch.Tensor,
    rows: int,
    batch: int,
    num_qo_heads: int,
    num_kv_heads: int,
    page_size: int,
    graph: bool,
    head_dim_qk: int,
    head_dim_vo: int,
    causal: bool,
    window_left: int,
    *ignored: Any,
) -> list[int]:
    """The plan's 15 integers, its arrays on their way to ``int_workspace``.

    Raises DoesNotFit where a step exceeds its captured grid, WorkspaceTooSmall, and ValueError.
    """
    order = SETTINGS.order
    if order is None or page_size != 1:
        raise ValueError(
            f"FlashInfer plans with pages of {page_size} tokens and order {order}; expected pages "
            "of 1 and an order: report it"
        )
    heads = planner.Heads(qo=num_qo_heads, kv=num_kv_heads, dim=head_dim_vo)
    room = float_workspace.numel() * float_workspace.element_size()
    # A window moves where splits begin, so it takes one.
    chunk = planner.ONE_PASS if window_left >= 0 else order.chunk
    qo, kv = qo_indptr.numpy()[: batch + 1], kv_indptr.numpy()[: batch + 1]
    tile = order.tile(rows if graph else int(qo[-1]), batch, heads)
    numbers = {"tile": tile, "chunk": chunk, "float_bytes": room}
    if not graph:
        made = planner.plan(qo, kv, heads, **numbers)
    elif rows == batch and int(qo[-1]) == batch and bool((qo[1:] > qo[:-1]).all()):
        made = _decode(int_workspace.data_ptr(), batch, heads, numbers)(kv)
    else:
        sizes = _prefill_sizes(batch, rows, heads, tile, chunk)
        made = planner.plan(qo, kv, heads, sizes=sizes, **numbers)
    return _sent(made, int_workspace, pinned)


def fits(kv_lens: Sequence[int] | np.ndarray) -> bool:
    """Whether a decode batch with these lengths fits the grid that is captured for its size.

    A larger captured batch has room for as many splits more as it has requests more.
    """
    order, lengths = SETTINGS.order, np.asarray(kv_lens)
    splits = np.maximum(-(-lengths // order.chunk), 1)
    room = planner.decode_splits(len(lengths), order.chunk, context=order.context, pool=order.pool)
    return int(splits.sum()) <= room


def workspace_needed(order: Order, rows: int, heads: planner.Heads, batch: int) -> int:
    """Bytes for steps of at most ``rows`` new tokens, or ``batch`` requests that decode."""
    return planner.workspace_bytes(max(rows, batch) * -(-order.context // order.chunk), heads)


def _decode(
    buffer: int, batch: int, heads: planner.Heads, numbers: dict[str, int]
) -> planner.DecodePlan:
    key = (buffer, batch, heads, *numbers.values())
    made = SETTINGS.decode.get(key)
    if made is None:
        order, chunk = SETTINGS.order, numbers["chunk"]
        splits = planner.decode_splits(batch, chunk, context=order.context, pool=order.pool)
        sizes = planner.decode_capture(batch, heads, numbers["tile"], splits)
        made = SETTINGS.decode[key] = planner.DecodePlan(batch, heads, sizes=sizes, **numbers)
    return made


def _prefill_sizes(
    batch: int, rows: int, heads: planner.Heads, tile: int, chunk: int
) -> planner.Capture:
    return planner.prefill_capture(batch, rows, heads, tile, chunk, context=SETTINGS.order.context)


def _sent(made: planner.Plan, int_workspace: torch.Tensor, pinned: torch.Tensor) -> list[int]:
    ring = SETTINGS.rings.get(pinned.data_ptr())
    if ring is None:
        ring = SETTINGS.rings[pinned.data_ptr()] = Ring(pinned)
    ring.send(made.image, int_workspace)
    return made.vector
