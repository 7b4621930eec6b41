"""The sampler's slow twin in float64 and whole numbers, and the settings that its tests share."""

from __future__ import annotations

import math

import numpy as np

ALL = 1 << 30
# temperature, top_k, top_p, min_p
SETTINGS = {
    "plain": (1.0, ALL, 1.0, 0.0),
    "cold": (0.5, ALL, 1.0, 0.0),
    "top_k": (1.0, 7, 1.0, 0.0),
    "top_p": (1.0, ALL, 0.8, 0.0),
    "min_p": (1.3, ALL, 1.0, 0.1),
    "all": (1.2, 12, 0.9, 0.05),
    "greedy": (0.7, 1, 1.0, 0.0),
}
# Chi-square exceeds this with a probability of 0.001: Wilson and Hilferty's approximation.
Z = 3.0902


def philox(counter, key):
    """Philox4x32-10 by its description."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k0, b % 2**32, a >> 32 ^ c[3] ^ k1, a % 2**32]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c


def words(seeds, positions, vocab):
    """The noise's words [N, V]: `philox` for many rows at once."""
    group, mask, low = np.arange(vocab, dtype=np.uint64) // 4, np.uint64(2**32 - 1), np.uint64(32)
    seeds, positions = (np.int64(x).astype(np.uint64)[:, None] for x in (seeds, positions))
    k0, k1 = seeds & mask, seeds >> low
    zero = np.zeros((len(seeds), vocab), dtype=np.uint64)
    c = [zero + group, zero + (positions & mask), zero + (positions >> low), zero]
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [b >> low ^ c[1] ^ k0, b & mask, a >> low ^ c[3] ^ k1, a & mask]
        k0, k1 = k0 + np.uint64(0x9E3779B9) & mask, k1 + np.uint64(0xBB67AE85) & mask
    return np.choose(np.arange(vocab) % 4, c)


def gumbel(word):
    """The noise of words; near 1, the complement of a word gives the logarithm."""
    word = np.asarray(word, dtype=np.uint64)
    near_one = ((~word & np.uint64(2**32 - 1)) + 0.5) * 2.0**-32
    log = np.where(near_one < 0.25, np.log1p(-near_one), np.log((word + 0.5) * 2.0**-32))
    return -np.log(-log)


def scaled(logits, setting):
    """x, in which a NaN is -inf; what is greedy is not scaled."""
    with np.errstate(invalid="ignore", over="ignore"):
        x = np.float32(logits) / np.float32(1 if setting[1] == 1 else setting[0])
    return np.where(np.isnan(x), np.float32(-np.inf), x) + np.float32(0)


def kept(logits, setting):
    """ids that are kept, in the order of falling x, by sorting and by sums of whole numbers."""
    _, top_k, top_p, min_p = setting
    x = scaled(logits, setting)
    order = np.lexsort((np.arange(len(x)), -x))
    if not np.isfinite(x.max()):
        return order[:1]
    p = np.exp(np.float64(x) - np.float64(x.max()))[order]
    weight = np.int64(p * 2.0**40)
    keep = np.arange(len(x)) < top_k
    if top_p < 1:
        before = np.cumsum(weight) - weight
        keep &= before <= int(float(np.float32(top_p)) * float(weight.sum()))
    keep &= (p >= np.float32(min_p)) & (x[order] > -np.inf)
    return order[keep]


def assert_tokens(tokens, logits, setting, seeds, positions, within=4e-6):
    """Each token is kept, and what is best by float64, or as good but for ``within``."""
    noise = gumbel(words(seeds, positions, logits.shape[1]))
    for row, (token, line) in enumerate(zip(np.asarray(tokens), logits, strict=True)):
        ids = kept(line, setting)
        assert token in ids, f"row {row}: {token} is not one of {len(ids)} kept ids"
        if len(ids) > 1:
            score = np.float64(scaled(line, setting)) + noise[row]
            assert score[token] >= score[ids].max() - within, f"row {row}: {token}"


def assert_chi_square(counts, expected):
    """counts follow what is expected of them, at the level 0.001."""
    free = len(counts) - 1
    if free:
        part = 2 / (9 * free)
        chi = ((counts - expected) ** 2 / expected).sum()
        assert chi < free * (1 - part + Z * math.sqrt(part)) ** 3
