"""The weight generator: its bits, and that they depend on what they should."""

from __future__ import annotations

import hashlib
import struct

import pytest
import torch

from sgl_det.make_model import weights
from sgl_det.make_model.weights import Parameter, chunks
from sgl_det.testing import assert_bitwise_equal


def reference(parameter, seed):
    """fp32 values, one by one, in Python's own integers."""
    text = f"sgl_det weights {weights.GENERATOR}\0{seed}\0{parameter.name}"
    key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    cols = parameter.numel // parameter.shape[0]
    scale = as_fp32(parameter.std / (4 * (65536**2 - 1) / 12) ** 0.5)
    for i in range(parameter.numel):
        x = (key + i * 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        x ^= x >> 31
        z = sum((x >> shift) & 0xFFFF for shift in (0, 16, 32, 48)) - 2 * 65535
        # A product of two fp32 is exact in double: as_fp32 is the only rounding.
        w = as_fp32(as_fp32(z * scale) + as_fp32(parameter.mean))
        yield w / 4 if i // cols in parameter.quiet else w


def as_fp32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


@pytest.mark.parametrize("mean", [0.0, 1.0], ids=["matrix", "norm"])
def test_values_are_those_of_plain_integers(mean):
    p = Parameter(name="a.weight", shape=(30, 41), mean=mean, std=0.3, quiet=(0, 7))
    found = torch.cat(list(chunks(p, 11, torch.float32, "cpu"))).tolist()
    assert found == list(reference(p, 11))


def test_golden_digest():
    """The generator is integers and single IEEE operations: one value for every toolchain."""
    p = Parameter(name="golden.weight", shape=(64, 48), mean=0.0, std=0.25, quiet=(1, 2))
    whole = torch.cat(list(chunks(p, 7, torch.bfloat16, "cpu")))
    digest = hashlib.sha256(whole.view(torch.uint8).numpy().tobytes()).hexdigest()
    assert digest[:16] == "fdb27de6706504c5"


def test_values_do_not_depend_on_chunks(monkeypatch):
    p = Parameter(name="x.weight", shape=(33, 70), mean=1.0, std=0.1, quiet=(5,))
    whole = torch.cat(list(chunks(p, 0, torch.float32, "cpu")))
    monkeypatch.setitem(weights._CHUNK, "cpu", 100)
    parts = list(chunks(p, 0, torch.float32, "cpu"))
    assert len(parts) == 33
    assert_bitwise_equal(torch.cat(parts), whole)


def test_values_have_the_mean_and_spread_asked_for():
    p = Parameter(name="x.weight", shape=(500, 1000), mean=3.0, std=0.5)
    values = torch.cat(list(chunks(p, 0, torch.float32, "cpu"))).double()
    # Five standard errors of half a million draws.
    assert abs(values.mean() - 3.0) < 5 * 0.5 / 707
    assert abs(values.std() - 0.5) < 5 * 0.5 / 1000
    matrix = values.view(500, 1000) - 3.0
    assert torch.corrcoef(matrix).fill_diagonal_(0).abs().max() < 6 / 1000**0.5
