"""The proof that attention gives a row the same bits however it is asked for, on this machine.

Compared are whole prompts with chunks of them, with other launches, and with decode by one and by
several programs, at lengths on both sides of tiles and splits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from sgl_det.kernels import attention_order as order
from sgl_det.kernels.attention import Launch, Options, attention
from sgl_det.kernels.attention_decode import Work, decode_attention

CHUNKS = (1, 17, 64)
SHARED = (1, 3)
_LAUNCHES = (Launch(16, 4, 2), Launch(32, 4, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """A layer as a kernel sees it: query heads, key heads, head size and dtype."""

    queries: int
    keys: int
    d: int
    dtype: torch.dtype


def lengths(window: int = -1) -> tuple[int, ...]:
    """Both sides of a tile, of a split, of two splits, and of a window."""
    edges = (order.BLOCK_S, order.SPLIT, 2 * order.SPLIT)
    around = (1, *(e + step for e in edges for step in (-1, 0, 1)), 2 * order.SPLIT + 300)
    if window < 0:
        return around
    return (*around, window, window + 1, window + 2, window + order.BLOCK_S + 3)


def first_mismatch(
    heads: Heads, options: Options, *, of: Sequence[int] | None = None, device: str = "cuda"
) -> str:
    """What differs from a whole prompt's attention, in a clause, or "" where every bit agrees.

    of   numbers of keys of the requests that are tried, by default `lengths`
    """
    requests = Requests(heads, options, of or lengths(options.window), device)
    whole, _ = requests.extend(requests.lengths)
    for name, new, found in requests.others():
        for b, n in enumerate(new):
            count = int((_bits(found[b]) != _bits(whole[b][-n:])).sum())
            if count:
                return f"{count} elements of a request of {requests.lengths[b]} keys differ {name}"
    return ""


class Requests:
    """Prompts of given lengths, their keys scattered over a pool."""

    def __init__(self, heads: Heads, options: Options, of: Sequence[int], device: str):
        source = torch.Generator(device).manual_seed(0)
        self.heads, self.options, self.lengths = heads, options, list(of)

        def made(*shape):
            empty = torch.empty(shape, dtype=heads.dtype, device=device)
            return empty.normal_(generator=source)

        slots, longest = sum(of) + 7, max(of)
        pool = (slots, heads.keys, heads.d)
        self.k, self.v = made(*pool), made(*pool)
        self.q = [made(n, heads.queries, heads.d) for n in of]
        place = torch.randperm(slots, device=device, generator=source).int()
        # Rows in another order than the requests, and more than there are.
        self.table = torch.zeros((len(of) + 1, longest + 3), dtype=torch.int32, device=device)
        self.rows = torch.arange(len(of), device=device).flip(0)
        for row, some in zip(self.rows, place[: sum(of)].split(list(of)), strict=True):
            self.table[row, : len(some)] = some
        self.counts = torch.tensor(self.lengths, device=device)
        self.work = Work.allocate(len(of), heads.queries, longest, heads.d, device)

    def extend(
        self, new: Sequence[int], launch: Launch | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The last ``new`` tokens of each request: ([o [new, H, D]], [lse [new, H]])."""
        q = torch.cat([x[len(x) - n :] for x, n in zip(self.q, new, strict=True)])
        starts = torch.tensor([0, *accumulate(new)], device=q.device)
        pools = (self.k, self.v, self.table, self.rows, starts, self.counts)
        lse = torch.empty(q.shape[:2], device=q.device)
        o = attention(q, *pools, max(new), self.options, launch=launch, lse=lse)
        return list(o.split(list(new))), list(lse.split(list(new)))

    def decode(self, shared: int, *, listed: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """The last token of each request, by ``shared`` programs: (o [B, H, D], lse [B, H]).

        listed   the slots of all requests one after the other, as a server has them, not a table
        """
        q = torch.stack([x[-1] for x in self.q])
        lse = torch.empty(q.shape[:2], device=q.device)
        where = (self.table, self.rows)
        if listed:
            rows = zip(self.rows, self.lengths, strict=True)
            where = (torch.cat([self.table[r, :n] for r, n in rows]), self.counts.cumsum(0))
        pools = (self.k, self.v, *where, self.counts)
        more = {"work": self.work, "shared": shared, "lse": lse}
        return decode_attention(q, *pools, self.options, **more), lse

    def others(self) -> Iterator[tuple[str, list[int], list[torch.Tensor]]]:
        """(what differs from a whole prompt, new tokens of each request, their attention)."""
        for launch in _LAUNCHES:
            name = f"with {launch.rows} rows a program"
            yield name, self.lengths, self.extend(self.lengths, launch)[0]
        for chunk in CHUNKS:
            new = [min(chunk, n) for n in self.lengths]
            yield f"in a chunk of {chunk} tokens", new, self.extend(new)[0]
        for shared in SHARED:
            name = f"in decode by {shared} program{'s' * (shared > 1)}"
            yield name, [1] * len(self.lengths), list(self.decode(shared, listed=True)[0].split(1))


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.int16)
