"""The sampler: its filters and noise against a slow twin, its distribution, and no neighbours."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from sgl_det.kernels import cpu
from sgl_det.kernels.sampler import sample
from sgl_det.testing import assert_bitwise_equal

from .sampler_twin import ALL, SETTINGS, assert_chi_square, assert_tokens, kept, philox

settings = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
DRAWS = 1 << 20


def draw(logits, setting, seeds, positions, **other):
    n = len(logits)
    given = [torch.full((n,), x) for x in setting]
    return sample(logits, *given, torch.as_tensor(seeds), torch.as_tensor(positions), **other)


@pytest.mark.parametrize(
    "word, want",
    [
        (0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (0xFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_the_noise_is_philox(word, want):
    """Known answers of Random123, of the twin above and of the kernel."""
    assert tuple(philox([word] * 4, [word] * 2)) == want
    counter = (ctypes.c_uint32 * 4)(*[word] * 4)
    cpu.library().sgl_det_philox(counter, ctypes.c_uint32(word), ctypes.c_uint32(word))
    assert tuple(counter) == want


@settings
@pytest.mark.parametrize("vocab", [1, 5, 50, 1003])
def test_tokens_are_those_of_the_twin(setting, vocab):
    made = torch.Generator().manual_seed(vocab)
    logits = 3 * torch.randn(40, vocab, generator=made)
    logits[20:] = logits[20:].round()  # many equal ones
    logits[5, : vocab // 2] = float("-inf")
    seeds, positions = torch.arange(40) * (2**33 + 7), torch.arange(40) % 7 * 2**31
    found = draw(logits, setting, seeds, positions)
    assert_tokens(found, logits.numpy(), setting, seeds, positions, within=1e-12)


@settings
def test_draws_follow_the_filtered_distribution(setting):
    """Chi-square over 2^20 draws, half of them by seed and half by position; exact support."""
    made = torch.Generator().manual_seed(3)
    row = 1.5 * torch.randn(40, generator=made)
    row[7] = row[3]
    counts, batch = np.zeros(40), 1 << 14
    for begin in range(0, DRAWS, batch):
        one, two = torch.arange(begin, begin + batch), torch.full((batch,), 11)
        seeds, positions = (one, two) if begin < DRAWS // 2 else (two, one)
        counts += np.bincount(draw(row.expand(batch, -1), setting, seeds, positions), minlength=40)
    ids = kept(row.numpy(), setting)
    assert set(np.flatnonzero(counts)) == set(ids)
    p = np.exp(np.float64(row.numpy()[ids]) / setting[0])
    expected = p / p.sum() * DRAWS
    assert_chi_square(counts[ids], expected)


@pytest.mark.parametrize("other", ["seed", "position"])
def test_noise_of_neighbours_is_not_correlated(other):
    """Tokens of equal logits, of numbers that follow each other: pairs fill a square evenly."""
    n, side = 1 << 16, 16
    logits, numbers, zero = torch.zeros(n, side), torch.arange(n), torch.zeros(n, dtype=torch.int64)
    given = (numbers, zero) if other == "seed" else (zero, numbers)
    tokens = draw(logits, SETTINGS["plain"], *given).numpy()
    pairs = np.bincount(tokens[:-1] * side + tokens[1:], minlength=side * side)
    assert_chi_square(pairs, (n - 1) / side**2)


def test_a_row_does_not_depend_on_its_batch():
    made = torch.Generator().manual_seed(1)
    n, vocab = 28, 5003
    logits = 4 * torch.randn(n, vocab, generator=made)
    columns = [torch.tensor(x) for x in zip(*[*SETTINGS.values()] * 4, strict=True)]
    seeds, positions = torch.arange(n) * 12345, torch.arange(n)
    whole = sample(logits, *columns, seeds, positions)
    for lo, hi in ((0, 1), (3, 4), (27, 28), (1, 9), (6, 7)):
        part = slice(lo, hi)
        some = sample(logits[part], *(x[part] for x in columns), seeds[part], positions[part])
        assert_bitwise_equal(some, whole[part], f"rows {lo} to {hi}")
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert_bitwise_equal(sample(logits, *columns, seeds, positions), whole, f"{count}")
    finally:
        torch.set_num_threads(threads)
    wide = torch.randn(n, vocab + 5)
    wide[:, :vocab] = logits
    assert_bitwise_equal(sample(wide[:, :vocab], *columns, seeds, positions), whole, "strides")


def test_control_another_seed_or_position_draws_others():
    logits, zero = torch.zeros(50, 1000), torch.zeros(50, dtype=torch.int64)
    first = draw(logits, SETTINGS["plain"], zero, zero)
    for seeds, positions in ((zero + 1, zero), (zero, zero + 1), (zero + 2**32, zero)):
        with pytest.raises(AssertionError, match="differ"):
            assert_bitwise_equal(draw(logits, SETTINGS["plain"], seeds, positions), first)


def test_greedy_takes_the_first_of_the_largest_logits():
    logits = torch.tensor([[0.0, 2.0, 2.0, -0.0], [-0.0, 0.0, -1.0, float("nan")]])
    assert draw(logits, (0.3, 1, 1.0, 0.0), [1, 2], [3, 4]).tolist() == [1, 0]


def test_top_p_of_nearly_nothing_and_equal_logits_keeps_the_first_ids():
    logits = torch.zeros(2000, 100)
    seeds, zero = torch.arange(2000), torch.zeros(2000, dtype=torch.int64)
    assert set(draw(logits, (1.0, ALL, 1e-6, 0.0), seeds, zero).tolist()) == {0}
    assert set(draw(logits, (1.0, ALL, 0.025, 0.0), seeds, zero).tolist()) == {0, 1, 2}
    assert set(draw(logits, (1.0, 5, 1.0, 0.0), seeds, zero).tolist()) == set(range(5))


def test_shapes_and_dtypes_are_checked():
    with pytest.raises(ValueError, match="1 seeds for 2 rows"):
        draw(torch.zeros(2, 3), SETTINGS["plain"], [1], [1, 2])
    with pytest.raises(ValueError, match="bfloat16"):
        draw(torch.zeros(1, 3).bfloat16(), SETTINGS["plain"], [1], [1])


def test_the_order_is_that_of_x():
    """Logits that differ, and no longer do once they are divided: the lower id comes first."""
    logits = torch.tensor([2 - 3 * 2**-23, 2 - 2**-22]).expand(200, 2)
    seeds, zero = torch.arange(200), torch.zeros(200, dtype=torch.int64)
    x = logits[0] / 1.5
    assert x[0] == x[1]
    assert set(draw(logits, (1.5, ALL, 1e-6, 0.0), seeds, zero).tolist()) == {0}
    assert set(draw(logits, (1.5, 1, 1.0, 0.0), seeds, zero).tolist()) == {1}
