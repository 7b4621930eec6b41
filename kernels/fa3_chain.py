"""FA3's chain over scores that are there: the launch of `cuda/fa3_chain.cu`

Shapes      as `fa3_decode` names them: scores [B, H, W'] and tops [B, H, W' / N] in, and o, or
            parts [B, chunks, H, D] and ends [2, B, chunks, H], out
Order       of `fa3_decode`
Bits depend on   what they depend on there; not on a `Launch`
"""

from __future__ import annotations

from ctypes import c_int
from typing import NamedTuple

import torch

from sgl_det.kernels import nvrtc
from sgl_det.kernels.fa3_chunks import TILES

SOURCE, ARCH = "fa3_chain.cu", "sm_90a"
MOST_GROUP = 8
# Warps of a thread block that weigh and fetch, and with the one that sums.
_WEIGH, _FETCH = 7, 4
_OTHERS = _WEIGH + 1 + _FETCH


class Launch(NamedTuple):
    """Columns of V a thread block, a multiple of 16, and tiles of V in flight, one of 4."""

    dv: int
    stages: int


# The fastest on an H200 from one request of 512 keys to four of 32,768, or within 8 % of it.
LAUNCH = Launch(64, 4)


def defines(d: int, group: int, chunk: int, single: bool, launch: Launch) -> dict[str, int]:
    """What the source is compiled with."""
    named = {"D": d, "GROUP": group, "C": chunk, "SINGLE": int(single)}
    return named | {"DV": launch.dv, "STAGES": launch.stages}


def threads(launch: Launch) -> int:
    """Of a thread block."""
    return 32 * (launch.dv // 16 + _OTHERS)


def shared_bytes(d: int, group: int, chunk: int, launch: Launch) -> int:
    """Of memory a thread block; the layout is that of struct Shared in the source."""
    n = TILES[d]
    tiles = chunk // n
    values = launch.stages * n * (launch.dv + 8) * 2
    weights = group * (chunk * 2 + _WEIGH * (n + 8) * 4)
    rest = 4 * (chunk + 3 * tiles * 8 + 16) + 8 * (2 * launch.stages + tiles + _WEIGH)
    return -(-(values + weights + rest) // 128) * 128


def attend(
    v_pool: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scores: torch.Tensor,
    tops: torch.Tensor,
    parts: torch.Tensor | None,
    ends: torch.Tensor | None,
    o: torch.Tensor,
    longest: int,
    log2: float,
    *,
    chunks: int,
    chunk: int,
    launch: Launch,
) -> None:
    """Writes o where parts and ends are None, which only one chunk allows; else parts and ends.

    longest  keys of a request that are seen; log2: what turns a score into a power of two
    It may begin while the kernel before it still runs. Raises RuntimeError.
    """
    batch, heads, d = o.shape
    groups = v_pool.shape[1]
    group, single = heads // groups, parts is None
    found = nvrtc.function(
        SOURCE,
        defines(d, group, chunk, single, launch),
        ARCH,
        threads(launch),
        shared_bytes(d, group, chunk, launch),
    )
    strides = v_pool.stride(0), v_pool.stride(1), table.stride(0), scores.stride(1)
    sizes = [c_int(x) for x in (groups, longest, chunks, batch)]
    found.launch(
        (d // launch.dv, groups * chunks, batch),
        v_pool, table, lengths, scores, tops, parts, ends, o, *strides, o.stride(0), o.stride(1),
        *sizes, log2, early=True,
    )  # fmt: skip
