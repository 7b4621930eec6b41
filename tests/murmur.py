"""SGLang's hash of a seed, a position and columns, which it computes on a GPU: a twin in torch.

MurmurHash3 for 32 bits (Appleby, 2011) of four words.
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF


def murmur_hash32(
    seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    """Of (seed low, seed high, position, column) -> int64 [N, V] in [0, 2**32)."""
    seed, positions, columns = (x.to(torch.int64) for x in (seed, positions, columns))
    h = torch.zeros_like(seed)
    for block in (seed & _MASK, (seed >> 32) & _MASK, positions & _MASK):
        h = _absorb(h, _scramble(block))
    h = _absorb(h[:, None], _scramble(columns)[None, :])
    h = h ^ 16  # the number of bytes hashed
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _MASK
    return h ^ (h >> 16)


def _rotate(x: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x << bits) | (x >> (32 - bits))) & _MASK


def _scramble(block: torch.Tensor) -> torch.Tensor:
    return (_rotate((block * 0xCC9E2D51) & _MASK, 15) * 0x1B873593) & _MASK


def _absorb(h: torch.Tensor, scrambled: torch.Tensor) -> torch.Tensor:
    return (_rotate(h ^ scrambled, 13) * 5 + 0xE6546B64) & _MASK
