"""Plans of FlashInfer's FA2 paged attention in which nothing but the sequence decides the order.

o[t, h] = merge over splits k of attention(q[t, h], K[kC:(k+1)C], V[kC:(k+1)C])

Shapes      qo_indptr, kv_indptr [B+1] in tokens (page size 1), B requests
Order       splits of C = ``chunk`` KV tokens at absolute positions, ascending; each is one pass
            over KV tiles, ascending, and is rounded to the output's dtype before the merge
Bits depend on   C and the kernel's KV tile, not on the query tile where the kernel is built from
            `flashinfer_headers` (both edits), nor on B, the grid, a CUDA graph or padding

A plan is what FlashInfer's ``module.plan`` returns (15 integers) and what it writes into the
integer workspace (the image). FlashInfer chooses the query tile by the mean length of the batch and
splits by load; here both are arguments. Its kernel takes one work item a block: (request, query
tile, split). A CUDA graph fixes the number of blocks, so `Capture` fixes every size, and a step
with more items than that raises `DoesNotFit`: it has the same bits without the graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sgl_det.kernels.flashinfer_order import KV_TILE

ONE_PASS = 1 << 30  # a split that no context exceeds, and that added to a position fits in 32 bits
TILES = (16, 64, 128)


class DoesNotFit(RuntimeError):
    """A step has more work items than the grid that was captured for it."""


class WorkspaceTooSmall(RuntimeError):
    """The splits of a step need more workspace than there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Query heads, KV heads and head size of the model's shard on this GPU."""

    qo: int
    kv: int
    dim: int

    @property
    def group(self) -> int:
        return self.qo // self.kv


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """What a CUDA graph fixes: blocks, query tokens, and rows of partial results."""

    items: int
    rows: int
    slots: int


class Plan(NamedTuple):
    vector: list[int]
    image: np.ndarray  # bytes of the integer workspace, from its beginning
    float_bytes: int


class _Offsets(NamedTuple):
    """Where each array lies in the image, in bytes."""

    request: int
    qo_tile: int
    kv_tile: int
    o_indptr: int
    chunk: int
    rows: int
    merge_indptr: int
    valid: int
    end: int


def decode_splits(batch: int, chunk: int, *, context: int, pool: int) -> int:
    """Splits that a captured decode batch has room for.

    ``context`` is the longest request. ``pool`` is the KV tokens there are; a batch may hold them
    twice over, since requests can share a prefix. Nothing here changes from step to step.
    """
    return min(batch * _ceil(context, chunk), batch + _ceil(2 * pool, chunk))


def decode_capture(batch: int, heads: Heads, tile: int, splits: int) -> Capture:
    """The sizes of a graph for ``batch`` requests with one new token each."""
    return Capture(items=splits * _ceil(heads.group, tile), rows=batch, slots=splits)


def prefill_capture(
    batch: int, rows: int, heads: Heads, tile: int, chunk: int, *, context: int
) -> Capture:
    """The sizes of a graph for at most ``rows`` new tokens of ``batch`` requests."""
    tiles, most = _ceil(rows * heads.group, tile) + batch - 1, _ceil(context, chunk)
    return Capture(items=tiles * most, rows=rows, slots=rows * most)


def workspace_bytes(slots: int, heads: Heads) -> int:
    """What that many rows of partial results take. Raises WorkspaceTooSmall beyond 32 bits."""
    return _float_offsets(slots, heads, None)[1]


def plan(
    qo_indptr: np.ndarray,
    kv_indptr: np.ndarray,
    heads: Heads,
    *,
    tile: int,
    chunk: int,
    sizes: Capture | None = None,
    float_bytes: int | None = None,
) -> Plan:
    """The plan of any batch; ``sizes`` where it is captured or replayed, else None.

    Raises DoesNotFit, WorkspaceTooSmall, and ValueError on a tile or split that cannot be held.
    """
    _check(tile, chunk)
    qo = np.asarray(qo_indptr, np.int64)
    qo_len, kv_len = np.diff(qo), np.diff(np.asarray(kv_indptr, np.int64))
    batch, rows = len(qo_len), int(qo[-1])
    splits = np.maximum(-(-kv_len // chunk), 1)
    items = -(-qo_len * heads.group // tile) * splits
    work = int(items.sum())
    o_indptr = np.concatenate([[0], np.cumsum(qo_len * splits)])
    split_kv = sizes is not None or bool((splits > 1).any())
    used = _fit(work, rows, int(o_indptr[-1]), sizes)
    s_offset, needed = _float_offsets(used.slots, heads, float_bytes) if split_kv else (0, 0)

    request = np.repeat(np.arange(batch), items)
    local = np.arange(work) - np.repeat(np.cumsum(items) - items, items)
    of_item = np.repeat(splits, items)
    at = _offsets(used.items, batch, used.rows, graph=sizes is not None, split_kv=split_kv)
    image = np.zeros(at.end, np.uint8)
    _put(image, at.request, request)
    _put(image, at.qo_tile, local // of_item)
    _put(image, at.kv_tile, local % of_item)
    _put(image, at.o_indptr, o_indptr)
    _put(image, at.chunk, [chunk])
    if sizes is not None:
        _put(image, at.rows, [rows])
    if split_kv:
        _put(image, at.merge_indptr, np.concatenate([[0], np.cumsum(np.repeat(splits, qo_len))]))
        image[at.valid : at.valid + work] = 1
    vector = _vector(used, tile, at, s_offset, graph=sizes is not None, split_kv=split_kv)
    return Plan(vector, image, needed)


class DecodePlan:
    """The plans of one captured decode batch, some 20 us each: one new token a request.

    The sizes, the vector and the offsets never change; each call rewrites the arrays in place.
    """

    def __init__(
        self,
        batch: int,
        heads: Heads,
        *,
        tile: int,
        chunk: int,
        sizes: Capture,
        float_bytes: int | None = None,
    ):
        _check(tile, chunk)
        self.batch, self.chunk, self.sizes = batch, chunk, sizes
        self._tiles = _ceil(heads.group, tile)
        s_offset, needed = _float_offsets(sizes.slots, heads, float_bytes)
        at = _offsets(sizes.items, batch, sizes.rows, graph=True, split_kv=True)
        image = np.zeros(at.end, np.uint8)
        vector = _vector(sizes, tile, at, s_offset, graph=True, split_kv=True)
        self.plan = Plan(vector, image, needed)
        self._request = _view(image, at.request, sizes.items)
        self._qo_tile = _view(image, at.qo_tile, sizes.items)
        self._kv_tile = _view(image, at.kv_tile, sizes.items)
        self._o_indptr = _view(image, at.o_indptr, batch + 1)
        self._merge_indptr = _view(image, at.merge_indptr, batch + 1)
        self._valid = image[at.valid : at.valid + sizes.items]
        _put(image, at.chunk, [chunk])
        _put(image, at.rows, [batch])
        self._ramp = np.arange(sizes.items, dtype=np.int32)
        self._rows = np.arange(batch, dtype=np.int32)
        self._last = 0  # items of the step before

    def __call__(self, kv_indptr: np.ndarray) -> Plan:
        """The plan of a step. Its image is overwritten by the next call."""
        kv = np.asarray(kv_indptr)
        splits = np.maximum((kv[1:] - kv[:-1] + (self.chunk - 1)) // self.chunk, 1)
        ends = splits.cumsum()
        work = int(ends[-1]) * self._tiles
        _fit(work, self.batch, int(ends[-1]), self.sizes)
        self._o_indptr[1:] = self._merge_indptr[1:] = ends
        items = splits * self._tiles if self._tiles > 1 else splits
        self._request[:work] = self._rows.repeat(items)
        local = self._ramp[:work] - (ends * self._tiles - items).repeat(items)
        if self._tiles > 1:
            of_item = splits.repeat(items)
            self._qo_tile[:work] = local // of_item
            local = local % of_item
        self._kv_tile[:work] = local
        self._valid[:work] = 1
        if work < self._last:
            for array in (self._request, self._qo_tile, self._kv_tile, self._valid):
                array[work : self._last] = 0
        self._last = work
        return self.plan


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _align(n: int) -> int:
    return -(-n // 16) * 16


def _check(tile: int, chunk: int) -> None:
    if tile not in TILES:
        raise ValueError(f"the query tile is {tile}, expected one of {TILES}")
    if chunk <= 0 or chunk % KV_TILE or chunk > ONE_PASS:
        wanted = f"expected a multiple of the KV tile, {KV_TILE}, at most {ONE_PASS}"
        raise ValueError(f"a split of {chunk} tokens cannot be held: {wanted}")


def _fit(work: int, rows: int, slots: int, sizes: Capture | None) -> Capture:
    """The sizes to lay out. Raises DoesNotFit if the step exceeds what was captured."""
    if sizes is None:
        return Capture(items=work, rows=rows, slots=slots)
    if work > sizes.items or rows > sizes.rows or slots > sizes.slots:
        raise DoesNotFit(
            f"this step has {work} work items, {rows} tokens and {slots} partial rows, but its "
            f"CUDA graph holds {sizes.items}, {sizes.rows} and {sizes.slots}: "
            "run it without the graph, which gives the same bits"
        )
    return sizes


def _float_offsets(slots: int, heads: Heads, available: int | None) -> tuple[int, int]:
    """Where the LSE of the partial results begins, after their values, and where it ends.

    FlashInfer reserves a whole fp32 query tile for each item, 4 to 128 times what is used.
    """
    values = slots * heads.qo * heads.dim
    s_offset = _align(2 * values)
    needed = s_offset + slots * heads.qo * 4
    if available is not None and needed > available:
        raise WorkspaceTooSmall(
            f"{slots} partial rows need {needed} bytes of workspace, found {available}: "
            "lower --chunked-prefill-size or --context-length"
        )
    if values >= 1 << 32:  # the kernel's index of an element has 32 bits
        raise WorkspaceTooSmall(
            f"{slots} partial rows have {values} elements, expected fewer than {1 << 32}: "
            "lower --chunked-prefill-size or --context-length"
        )
    return s_offset, needed


def _offsets(items: int, batch: int, rows: int, *, graph: bool, split_kv: bool) -> _Offsets:
    """FlashInfer's own layout: what its PrefillPlan allocates, in that order and alignment."""
    qo_tile = _align(4 * items)
    kv_tile = _align(qo_tile + 4 * items)
    o_indptr = _align(kv_tile + 4 * items)
    chunk = o_indptr + 4 * (batch + 1)
    end = chunk + 4
    at_rows = merge_indptr = valid = 0
    if graph:
        at_rows = _align(end)
        end = at_rows + 4
    if split_kv:
        merge_indptr = _align(end)
        valid = _align(merge_indptr + 4 * (rows + 1))
        end = valid + items
    return _Offsets(0, qo_tile, kv_tile, o_indptr, chunk, at_rows, merge_indptr, valid, end)


def _vector(
    sizes: Capture, tile: int, at: _Offsets, s_offset: int, *, graph: bool, split_kv: bool
) -> list[int]:
    """The fields of FlashInfer's PrefillPlanInfo, in its order."""
    head = [sizes.items, sizes.rows, at.rows, tile, at.request, at.qo_tile, at.kv_tile]
    tail = [at.merge_indptr, at.o_indptr, at.chunk, 0, s_offset, at.valid]
    return [*head, *tail, int(graph), int(split_kv)]


def _view(image: np.ndarray, offset: int, count: int) -> np.ndarray:
    return image[offset : offset + 4 * count].view(np.int32)


def _put(image: np.ndarray, offset: int, values: np.ndarray | list[int]) -> None:
    _view(image, offset, len(values))[:] = values
