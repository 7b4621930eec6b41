"""Seeded sampling:  token[n] = argmax_v(logprobs[n, v] + gumbel(seed[n], position[n], v))

Shapes      logprobs [N, V]   seed, position [N]   -> token [N, 1], int64
Dtypes      logprobs of any float; the noise and the sum in fp64
Order       none: every step is elementwise, and the maximum is exact (the first index wins a tie)
Bits depend on   the row's logprobs, seed and position - not on N or on what other rows hold
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF


def multinomial_with_seed(
    logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """One index a row, drawn by the Gumbel trick. Raises ValueError unless shapes are as above."""
    n, v = logprobs.shape
    if seed.shape != (n,) or positions.shape != (n,):
        raise ValueError(
            f"seed {tuple(seed.shape)} and positions {tuple(positions.shape)} must be ({n},)"
        )
    columns = torch.arange(v, device=logprobs.device)
    # Half a step inside both ends: neither logarithm can meet 0 or 1.
    uniform = (murmur_hash32(seed, positions, columns).to(torch.float64) + 0.5) / 2.0**32
    noise = uniform.log_().neg_().log_().neg_()
    return torch.argmax(noise.add_(logprobs.to(torch.float64)), dim=1, keepdim=True)


def murmur_hash32(
    seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    """MurmurHash3 of (seed low, seed high, position, column) -> int64 [N, V] in [0, 2**32)."""
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
