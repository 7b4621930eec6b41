"""Which calls of FlashAttention-3 give every row one order over a long context

The keys of a request are cut at multiples of C tokens, wherever its rows are computed. FA3 takes
each chunk in one pass as a sequence of its own, which only points at the pages of the chunk, and
`merge_chunks` adds what they give in ascending order. So a row at position p always has the chunks
0 .. p // C, and the last one ends at p: in decode, and in a prefill whatever came from the cache.

Shapes      q, o [T, H, D]   pools [slots, 1, G, D]   table [B, W] of slots; chunk c of request b is
            table[b, c * C : (c + 1) * C]   lengths [B]
Dtypes      table, lengths, cumulated starts int32 (as FA3 takes them); rows of q int64
Order       FA3's inside a chunk: tiles of N keys from the chunk's start, last to first, in one
            pass, with the tile N of `reduction_order` held by the longest query it is told of
Bits depend on   D, C, N and the row's own position; a context of at most C tokens has the bits of
                 a call that knows no chunks

Decode is one call for all chunks of all requests. A prefill is one causal call on the segments of
the new tokens that lie in one chunk each, and then one call, causal in nothing, for so many past
chunks as fit MOST_ROWS copied rows of q.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sgl_det.kernels.merge_chunks import Rows, State, merge_chunks
from sgl_det.kernels.order import ReductionOrder

DTYPES = (torch.bfloat16, torch.float16)
# Head size -> keys a tile with pages of one token, and tokens a chunk, a multiple of them.
TILES = {64: 128, 128: 128, 256: 80}
CHUNKS = {64: 4096, 128: 4096, 256: 5120}
MOST_ROWS = 16384
_MAIN_PATH_ROWS = 64


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of one call of FA3.

    table    pages [V, W]
    lengths  keys of each [V]
    starts   [V + 1]: sequence v has the rows starts[v] .. starts[v + 1] of the call's q
    longest  rows of the longest, at least
    causal   its last row sees every key, each row before one key less; else every row all keys
    """

    table: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    longest: int
    causal: bool


@dataclass(frozen=True, slots=True)
class Chunked:
    """One call on copied rows of q, and where the merge finds its results.

    source  [R]: the row of q that each row of the call is
    rows    for each of the T rows of q, where its chunks lie among the R
    """

    sequences: Sequences
    source: torch.Tensor
    rows: Rows


@dataclass(frozen=True, slots=True)
class Extend:
    """The calls of a prefill: each row's own chunk, on q itself; then the chunks before it."""

    own: Sequences
    past: tuple[Chunked, ...]


# q [R, H, D], its sequences, and where to write or None -> o [R, H, D], lse [H, R].
Call = Callable[[torch.Tensor, Sequences, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]


def reduction_order(*, d: int, dtype: torch.dtype, arch: int) -> ReductionOrder:
    """The order of one row. Raises ValueError on a head size, dtype or GPU that is not held."""
    if d not in TILES or dtype not in DTYPES or arch != 90:
        raise ValueError(
            f"no order for heads of {d} in {dtype} on sm_{arch}; there are heads of "
            f"{tuple(TILES)} in bf16 and fp16 on sm_90"
        )
    return ReductionOrder(axis="S", block=TILES[d], split=CHUNKS[d])


def told_longest(d: int, group: int, longest: int) -> int:
    """What to tell FA3 of the longest query, so that it takes one KV tile whatever it is.

    group   query heads a key head
    longest rows of the longest query of the call
    Heads of 64 have another tile where longest * group <= 64. Heads of 256 lose the causal flag at
    one row. Heads of 128 keep both.
    """
    least = {64: max(2, _MAIN_PATH_ROWS // group + 1), 256: 2}
    return max(longest, least.get(d, 1))


def chunks_of(length: int, chunk: int) -> int:
    """Chunks of a request of ``length`` keys: at least one."""
    return max(1, -(-length // chunk))


def plan_decode(lengths: torch.Tensor, table: torch.Tensor, chunk: int, capacity: int) -> Chunked:
    """One row a request: a call of ``capacity`` sequences, filled from the front.

    Only tensor operations of fixed shapes, so a CUDA graph can hold it. ``capacity`` is at least
    the sum of `chunks_of` over the requests: what exceeds it would be left out. Sequences that are
    left over have neither rows nor keys.
    """
    count = ((lengths + (chunk - 1)) // chunk).clamp(min=1)
    ends = torch.cumsum(count, 0)  # int64 [B]
    v = torch.arange(capacity, device=lengths.device)
    request = torch.searchsorted(ends, v, right=True).clamp(max=len(lengths) - 1)
    first = ends - count
    begin = (v - first[request]) * chunk
    keys = (lengths[request] - begin).clamp(0, chunk)
    starts = torch.arange(capacity + 1, device=lengths.device).minimum(ends[-1])
    sequences = Sequences(
        _pages(table, request, begin, chunk), keys.int(), starts.int(), longest=1, causal=True
    )
    rows = Rows(first.int(), torch.ones_like(lengths, dtype=torch.int32), count.int())
    return Chunked(sequences, request, rows)


def _pages(
    table: torch.Tensor, request: torch.Tensor, begin: torch.Tensor, chunk: int
) -> torch.Tensor:
    """table[request[v], begin[v] : begin[v] + chunk] for each v; past its end the last column."""
    width = min(chunk, table.shape[1])
    columns = begin[:, None] + torch.arange(width, device=table.device)
    return table[request[:, None], columns.clamp(max=table.shape[1] - 1)]


class _Segment(NamedTuple):
    """New tokens begin .. end of a request, in one chunk; ``at`` is the first one's row of q."""

    request: int
    begin: int
    end: int
    at: int

    @property
    def rows(self) -> int:
        return self.end - self.begin


def _segments(prefix: Sequence[int], new: Sequence[int], chunk: int) -> Iterator[_Segment]:
    at = 0
    for request, (begin, count) in enumerate(zip(prefix, new, strict=True)):
        end = begin + count
        while begin < end:
            stop = min(end, (begin // chunk + 1) * chunk)
            yield _Segment(request, begin, stop, at)
            begin, at = stop, at + stop - begin


class _Piece(NamedTuple):
    """A segment beside its past chunks first .. last."""

    segment: _Segment
    first: int
    last: int


def _groups(segments: Sequence[_Segment], chunk: int, most_rows: int) -> Iterator[list[_Piece]]:
    """Every segment with every chunk before its own, in groups of at most ``most_rows`` rows.

    A group has at least one chunk of one segment. The chunks of a segment are in ascending order.
    """
    group: list[_Piece] = []
    free = most_rows
    for segment in segments:
        first, own = 0, segment.begin // chunk
        while first < own:
            fit = min(own - first, max(free, 0) // segment.rows)
            if not fit and group:
                yield group
                group, free = [], most_rows
                continue
            fit = max(1, fit)
            group.append(_Piece(segment, first, first + fit))
            first, free = first + fit, free - fit * segment.rows
    if group:
        yield group


def plan_extend(
    prefix: Sequence[int],
    new: Sequence[int],
    table: torch.Tensor,
    chunk: int,
    most_rows: int = MOST_ROWS,
) -> Extend:
    """Requests whose first ``prefix`` keys are in the pool, and ``new`` more; known to the host.

    The rows of q are the new tokens, one request after the other. ``most_rows`` bounds the memory,
    and never shows in the bits.
    """
    segments = list(_segments(prefix, new, chunk))
    own = [s.begin // chunk for s in segments]
    sequences = _sequences(
        table,
        [
            (s.request, c * chunk, s.end - c * chunk, s.rows)
            for s, c in zip(segments, own, strict=True)
        ],
        chunk,
        causal=True,
    )
    total = sum(new)
    groups = _groups(segments, chunk, most_rows)
    return Extend(sequences, tuple(_chunked(table, group, chunk, total) for group in groups))


def _sequences(table: torch.Tensor, made: list[tuple[int, ...]], chunk: int, causal: bool):
    """``made``: request, first key, keys and rows of each sequence."""
    request, begin, keys, rows = torch.tensor(made, dtype=torch.int64).view(-1, 4).T
    starts = torch.nn.functional.pad(torch.cumsum(rows, 0), (1, 0))
    request, begin = (x.to(table.device) for x in (request, begin))
    keys, starts = (x.int().to(table.device) for x in (keys, starts))
    longest = max((m[3] for m in made), default=0)
    return Sequences(_pages(table, request, begin, chunk), keys, starts, longest, causal)


def _chunked(table: torch.Tensor, group: list[_Piece], chunk: int, total: int) -> Chunked:
    made, source, at = [], [], 0
    first, step, count = torch.zeros((3, total), dtype=torch.int32)
    for s, begin, end in group:
        mine = slice(s.at, s.at + s.rows)
        rows = torch.arange(s.at, s.at + s.rows)
        made += [(s.request, c * chunk, chunk, s.rows) for c in range(begin, end)]
        source += [rows] * (end - begin)
        first[mine] = torch.arange(at, at + s.rows, dtype=torch.int32)
        step[mine], count[mine] = s.rows, end - begin
        at += (end - begin) * s.rows
    sequences = _sequences(table, made, chunk, causal=False)
    rows = Rows(*(x.to(table.device) for x in (first, step, count)))
    return Chunked(sequences, torch.cat(source).to(table.device), rows)


def decode_attention(
    call: Call,
    q: torch.Tensor,
    plan: Chunked,
    *,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    merge: Callable[..., torch.Tensor] = merge_chunks,
) -> torch.Tensor:
    """Attention of one row a request over all its keys, by one call and one merge -> o."""
    parts, parts_lse = call(q.index_select(0, plan.source), plan.sequences, None)
    out = torch.empty_like(parts[: len(q)]) if out is None else out
    return merge(parts, parts_lse, plan.rows, out=out, lse=lse, sinks=sinks)


def extend_attention(
    call: Call,
    q: torch.Tensor,
    plan: Extend,
    *,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    merge: Callable[..., torch.Tensor] = merge_chunks,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of all new tokens: rows in their first chunk keep what the first call gives.

    Returns o [T, H, D], which is ``out`` where ``call`` wrote there, and lse [H, T].
    """
    o, lse = call(q, plan.own, out)
    end = {"out": o, "lse": lse, "last": True, "sinks": sinks}
    if not plan.past:
        if sinks is not None:
            merge(o[:0], lse[:, :0], Rows.none(len(o), o.device), **end)
        return o, lse
    state = State.allocate(*o.shape, o.device) if len(plan.past) > 1 else None
    for group in plan.past:
        final = group is plan.past[-1]
        parts, parts_lse = call(q.index_select(0, group.source), group.sequences, None)
        merge(parts, parts_lse, group.rows, state=state, final=final, **end)
    return o, lse
