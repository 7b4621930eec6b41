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

Decode is one call for all chunks of all requests; `fa3_extend` plans a prefill.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sgl_det.kernels.merge_chunks import Rows, merge_chunks
from sgl_det.kernels.order import ReductionOrder

DTYPES = (torch.bfloat16, torch.float16)
# Head size -> keys a tile with pages of one token, and tokens a chunk, a multiple of them.
TILES = {64: 128, 128: 128, 256: 80}
CHUNKS = {64: 4096, 128: 4096, 256: 5120}
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
        pages(table, request, begin, chunk), keys.int(), starts.int(), longest=1, causal=True
    )
    rows = Rows(first.int(), torch.ones_like(lengths, dtype=torch.int32), count.int())
    return Chunked(sequences, request, rows)


def pages(
    table: torch.Tensor, request: torch.Tensor, begin: torch.Tensor, chunk: int
) -> torch.Tensor:
    """table[request[v], begin[v] : begin[v] + chunk] for each v; past its end the last column."""
    width = min(chunk, table.shape[1])
    columns = begin[:, None] + torch.arange(width, device=table.device)
    return table[request[:, None], columns.clamp(max=table.shape[1] - 1)]


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
