"""What the GPU's sampler computes for one number, emulated: words, noise and weights."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from sgl_det.kernels import gpu_sampler
from sgl_det.kernels.gpu_sampler import Launch

from . import cuda_emulator
from .sampler_twin import gumbel, philox, words

pytestmark = cuda_emulator.needs_compiler
SMALL = Launch(32, 32, 64, 4)


@pytest.mark.parametrize("launch", [SMALL, Launch(64, 64, 4096, 1)], ids=str)
def test_the_layout_is_that_of_the_source(launch):
    library = cuda_emulator.sampler(launch)
    for step in gpu_sampler.STEPS:
        assert library.of_bytes(step) == gpu_sampler.shared_bytes(step, launch)


@pytest.mark.parametrize("word", [0, 1, 2**32 - 1, 0x6A09E667])
def test_the_noise_is_philox(word):
    """The words of the twins, and a known answer where it is one; noise within its rounding."""
    counter, key = (ctypes.c_uint32 * 4)(*[word] * 4), (ctypes.c_uint32 * 2)(word, word)
    noise = (ctypes.c_float * 4)()
    cuda_emulator.sampler(SMALL).of_noise(counter, key, noise)
    assert list(counter) == philox([word] * 4, [word] * 2)
    known = {0: 0x6627E8D5, 2**32 - 1: 0x408F276D}
    assert counter[0] == known.get(word, counter[0])
    want = gumbel(list(counter))
    assert (np.abs(np.array(noise) - want) < 2**-21 * np.maximum(np.abs(want), 1)).all()
    seed, position = 3 * 2**33 + 5, 7 * 2**32 + 9
    found = words([seed], [position], 6)[0]
    want = philox([1, 9, 7, 0], [5, 6])
    assert found[4:].tolist() == want[:2]


def test_noise_is_near_float64_and_finite_everywhere():
    """Both ends word by word, where a number changes its exponent, and words between."""
    ends = np.arange(2048, dtype=np.uint64)
    powers = np.array([2**k + d for k in range(1, 32) for d in (-1, 0, 1)], dtype=np.uint64)
    near_root = np.uint64(2**31.5) + np.arange(0, 2**12, 7, dtype=np.uint64) - np.uint64(2048)
    some = np.random.default_rng(0).integers(0, 2**32, 20000, dtype=np.uint64)
    tried = np.concatenate([ends, powers, near_root, some])
    tried = np.unique(np.concatenate([tried, ~tried & np.uint64(2**32 - 1)]))
    found = np.empty(len(tried), dtype=np.float32)
    given = tried.astype(np.uint32)
    pointers = (ctypes.c_void_p(x.ctypes.data) for x in (given, found))
    cuda_emulator.sampler(SMALL).of_words(*pointers, len(given))
    want = gumbel(tried)
    assert np.isfinite(found).all() and -3.2 < found.min() and found.max() < 22.9
    error = np.abs(found - want) / np.maximum(np.abs(want), 1)
    assert error.max() < 2**-21, f"word {tried[error.argmax()]:#x}: {error.max()}"
    assert (np.diff(found[tried >= 2**32 - 2048]) > 0).all()
    assert (np.diff(found[tried < 2048]) > 0).all()


def test_weights_are_near_float64_and_those_of_equal_logits_equal():
    source = np.random.default_rng(1)
    weigh = cuda_emulator.sampler(SMALL).of_weight
    assert weigh(5.0, 5.0) == 2**40 and weigh(float("-inf"), 5.0) == 0
    for scale in (0.01, 1, 30):
        x = np.float32(scale) * np.sort(source.standard_normal((1000, 2)).astype(np.float32))
        found = np.array([weigh(*row) for row in x], dtype=np.float64)
        want = 2.0**40 * np.exp(np.float64(x[:, 0]) - np.float64(x[:, 1]))
        assert (np.abs(found - want) <= 2**-22 * want + 1).all()
