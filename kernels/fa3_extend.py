"""Which calls of FlashAttention-3 a prefill takes, whose keys are cut into chunks (`fa3_chunks`)

One causal call on the segments of the new tokens that lie in one chunk each. Then calls that are
causal in nothing, for the chunks before: where few rows have any, one call on copied rows for so
many chunks as fit MOST_COPIED rows; where there are many, one call a chunk on the rows of q where
they lie, in groups of at most MOST_PARTS rows of results, each merged at once.

Shapes      q, o [T, H, D]; lse [H, T]; table [B, W] of slots
Order       that of `fa3_chunks`
Bits depend on   what they depend on there - not on how the calls are made up
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sgl_det.kernels.fa3_chunks import Call, Chunked, Sequences, pages
from sgl_det.kernels.merge_chunks import Rows, State, merge_chunks

# Any values give the same bits. The rows from which a call a chunk fills the GPU.
MANY_ROWS, MOST_COPIED, MOST_PARTS = 1024, 4096, 49152


@dataclass(frozen=True, slots=True)
class InPlace:
    """Calls on the rows begin .. end of q, one a chunk in ascending order, and their merge.

    Where a row does not lie behind a chunk, the call has a sequence without keys.
    """

    begin: int
    end: int
    calls: tuple[Sequences, ...]
    rows: Rows


@dataclass(frozen=True, slots=True)
class Extend:
    """The calls of a prefill: each row's own chunk, on q itself; then the chunks before it."""

    own: Sequences
    past: tuple[Chunked | InPlace, ...]


class _Segment(NamedTuple):
    """New tokens begin .. end of a request, in its chunk ``own``; ``at``: the first one's row."""

    request: int
    begin: int
    end: int
    at: int
    own: int

    @property
    def rows(self) -> int:
        return self.end - self.begin


def plan_extend(
    prefix: Sequence[int],
    new: Sequence[int],
    table: torch.Tensor,
    chunk: int,
    *,
    many_rows: int = MANY_ROWS,
    most_rows: int | None = None,
) -> Extend:
    """Requests whose first ``prefix`` keys are in the pool, and ``new`` more; known to the host.

    The rows of q are the new tokens, one request after the other. Neither number of rows shows in
    the bits: from ``many_rows`` behind a chunk, q is not copied; ``most_rows`` bounds the memory.
    """
    segments = list(_segments(prefix, new, chunk))
    made = [(s.request, s.own * chunk, s.end - s.own * chunk, s.rows) for s in segments]
    own, deep = _sequences(table, made, chunk, causal=True), [s for s in segments if s.own]
    if not deep:
        return Extend(own, ())
    begin, end, total = deep[0].at, deep[-1].at + deep[-1].rows, sum(new)
    if end - begin >= many_rows:
        across = [s for s in segments if begin <= s.at < end]
        past = _in_place(table, across, chunk, total, most_rows or MOST_PARTS)
    else:
        groups = _groups(deep, most_rows or MOST_COPIED)
        past = (_chunked(table, group, chunk, total) for group in groups)
    return Extend(own, tuple(past))


def _segments(prefix: Sequence[int], new: Sequence[int], chunk: int) -> Iterator[_Segment]:
    at = 0
    for request, (begin, count) in enumerate(zip(prefix, new, strict=True)):
        end = begin + count
        while begin < end:
            own = begin // chunk
            stop = min(end, (own + 1) * chunk)
            yield _Segment(request, begin, stop, at, own)
            begin, at = stop, at + stop - begin


def _sequences(table: torch.Tensor, made: list[tuple[int, ...]], chunk: int, causal: bool):
    """``made``: request, first key, keys and rows of each sequence."""
    request, begin, keys, rows = torch.tensor(made, dtype=torch.int64).view(-1, 4).T
    starts = torch.nn.functional.pad(torch.cumsum(rows, 0), (1, 0))
    request, begin = (x.to(table.device) for x in (request, begin))
    keys, starts = (x.int().to(table.device) for x in (keys, starts))
    longest = max((m[3] for m in made), default=0)
    return Sequences(pages(table, request, begin, chunk), keys, starts, longest, causal)


def _in_place(
    table: torch.Tensor, segments: list[_Segment], chunk: int, total: int, most_rows: int
) -> Iterator[InPlace]:
    """Every chunk that lies before one of the segments, whose rows follow one another."""
    begin, end = segments[0].at, segments[-1].at + segments[-1].rows
    own = torch.zeros(total, dtype=torch.int32)
    for s in segments:
        own[s.at : s.at + s.rows] = s.own
    first = (torch.arange(total, dtype=torch.int32) - begin).clamp(0, end - begin - 1)
    step = torch.full_like(first, end - begin)
    last, at_once = int(own.max()), max(1, most_rows // (end - begin))
    for c in range(0, last, at_once):
        after = min(c + at_once, last)
        calls = (
            _sequences(table, _behind(segments, i, chunk), chunk, False) for i in range(c, after)
        )
        count = (own - c).clamp(0, after - c)
        rows = Rows(*(x.to(table.device) for x in (first, step, count)))
        yield InPlace(begin, end, tuple(calls), rows)


def _behind(segments: list[_Segment], c: int, chunk: int) -> list[tuple[int, ...]]:
    """The sequences of the call on chunk c; rows that do not lie behind it have no keys."""
    made: list[tuple[int, ...]] = []
    for s in segments:
        keys = chunk if s.own > c else 0
        if made and made[-1][2] == keys and (not keys or made[-1][0] == s.request):
            *same, rows = made.pop()
            made.append((*same, rows + s.rows))
        else:
            made.append((s.request, c * chunk, keys, s.rows))
    return made


class _Piece(NamedTuple):
    """A segment beside its past chunks first .. last."""

    segment: _Segment
    first: int
    last: int


def _groups(segments: Sequence[_Segment], most_rows: int) -> Iterator[list[_Piece]]:
    """Every segment with every chunk before its own, in groups of at most ``most_rows`` rows.

    A group has at least one chunk of one segment. The chunks of a segment are in ascending order.
    """
    group: list[_Piece] = []
    free = most_rows
    for segment in segments:
        first = 0
        while first < segment.own:
            fit = min(segment.own - first, max(free, 0) // segment.rows)
            if not fit and group:
                yield group
                group, free = [], most_rows
                continue
            fit = max(1, fit)
            group.append(_Piece(segment, first, first + fit))
            first, free = first + fit, free - fit * segment.rows
    if group:
        yield group


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
        parts, parts_lse = _parts(call, q, group)
        merge(parts, parts_lse, group.rows, state=state, final=final, **end)
    return o, lse


def _parts(call: Call, q: torch.Tensor, group: Chunked | InPlace):
    """o [R, H, D] and lse [H, R] of the past chunks of a group."""
    if isinstance(group, Chunked):
        return call(q.index_select(0, group.source), group.sequences, None)
    rows, n = q[group.begin : group.end], group.end - group.begin
    parts = q.new_empty((len(group.calls) * n, *q.shape[1:]))
    lse = q.new_empty((q.shape[1], len(parts)), dtype=torch.float32)
    for at, sequences in zip(range(0, len(parts), n), group.calls, strict=True):
        given = parts[at : at + n]
        found, lse[:, at : at + n] = call(rows, sequences, given)
        if found.data_ptr() != given.data_ptr():
            given.copy_(found)
    return parts, lse
