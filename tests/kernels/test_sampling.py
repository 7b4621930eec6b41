"""Seeded sampling in PyTorch: the hash, and independence of the batch."""

from __future__ import annotations

import pytest
import torch

from sgl_det.kernels.sampling import multinomial_with_seed, murmur_hash32
from sgl_det.testing import assert_bitwise_equal


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, from its description, for lengths divisible by four."""
    h = 0
    for i in range(0, len(data), 4):
        k = int.from_bytes(data[i : i + 4], "little") * 0xCC9E2D51 % 2**32
        k = (k << 15 | k >> 17) % 2**32 * 0x1B873593 % 2**32
        h ^= k
        h = ((h << 13 | h >> 19) % 2**32 * 5 + 0xE6546B64) % 2**32
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


@pytest.mark.parametrize("seed, position, column", [(0, 0, 0), (42, 7, 151935), (2**40 + 5, 1, 3)])
def test_hash_is_murmur3(seed, position, column):
    data = b"".join(x.to_bytes(n, "little") for x, n in ((seed, 8), (position, 4), (column, 4)))
    found = murmur_hash32(*(torch.tensor([x]) for x in (seed, position, column)))
    assert found.item() == murmur3(data)


def test_row_does_not_depend_on_its_batch():
    torch.manual_seed(0)
    logprobs = torch.randn(17, 321).log_softmax(-1)
    seed, position = torch.arange(17) * 1000, torch.arange(17) % 5
    whole = multinomial_with_seed(logprobs, seed, position)
    for lo, hi in ((0, 1), (3, 4), (16, 17), (1, 9)):
        part = multinomial_with_seed(logprobs[lo:hi], seed[lo:hi], position[lo:hi])
        assert_bitwise_equal(part, whole[lo:hi])


def test_draws_follow_the_distribution_and_never_the_impossible():
    p = torch.tensor([0.5, 0.25, 0.25, 0.0])
    n = 20000
    rows = p.log().expand(n, -1)
    drawn = multinomial_with_seed(rows, torch.arange(n), torch.zeros(n, dtype=torch.int64))
    share = torch.bincount(drawn.view(-1), minlength=4) / n
    assert (share - p).abs().max() < 0.02 and share[3] == 0


def test_control_another_seed_draws_another_token():
    rows = torch.zeros(50, 1000)
    zero = torch.zeros(50, dtype=torch.int64)
    with pytest.raises(AssertionError, match="differ"):
        assert_bitwise_equal(
            multinomial_with_seed(rows, zero, zero), multinomial_with_seed(rows, zero + 1, zero)
        )


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"must be \(2,\)"):
        multinomial_with_seed(torch.zeros(2, 3), torch.zeros(1), torch.zeros(2))
