"""The proof of attention at start-up: it passes where one order serves, and names what differs."""

from __future__ import annotations

import pytest
import torch

from sgl_det.kernels import attention_order, attention_proof
from sgl_det.kernels.attention import Options
from sgl_det.kernels.attention_proof import Heads, first_mismatch

from .interpreter import ACTIVE, DEVICE, MARKS, pick

pytestmark = MARKS
HEADS = Heads(queries=4, keys=2, d=64, dtype=torch.float16)
KEYS = pick(gpu=None, interpreter=(1, 16, 33, 49))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """An interpreter takes tiles one by one."""
    if ACTIVE:
        monkeypatch.setattr(attention_order, "BLOCK_S", 16)
        monkeypatch.setattr(attention_order, "SPLIT", 32)
        monkeypatch.setattr(attention_proof, "CHUNKS", (17,))


@pytest.mark.parametrize(
    "options",
    [
        Options(0.125),
        *pick(gpu=[Options(0.125, cap=20.0), Options(0.125, window=100)], interpreter=[]),
    ],
    ids=str,
)
def test_one_order_passes(options):
    assert first_mismatch(HEADS, options, of=KEYS, device=DEVICE) == ""


def test_control_decode_in_other_splits_is_found(monkeypatch):
    """As a backend whose decode splits the keys more finely than its prefill."""
    decode, merged = attention_proof.decode_attention, attention_order.SPLIT

    def finer(*args, **kwargs):
        with monkeypatch.context() as patch:
            patch.setattr(attention_order, "SPLIT", merged // 2)
            return decode(*args, **kwargs | {"work": None, "shared": 1})

    monkeypatch.setattr(attention_proof, "decode_attention", finer)
    found = first_mismatch(HEADS, Options(0.125), of=KEYS, device=DEVICE)
    assert "elements of a request of" in found and "in decode by 1 program" in found


def test_control_chunks_in_other_tiles_are_found(monkeypatch):
    attend, tile = attention_proof.attention, attention_order.BLOCK_S

    def other(q, *args, **kwargs):
        with monkeypatch.context() as patch:
            if len(q) < sum(KEYS or attention_proof.lengths()):
                patch.setattr(attention_order, "BLOCK_S", 2 * tile)
            return attend(q, *args, **kwargs)

    monkeypatch.setattr(attention_proof, "attention", other)
    found = first_mismatch(HEADS, Options(0.125), of=KEYS, device=DEVICE)
    assert "in a chunk of" in found


def test_lengths_straddle_tiles_and_splits():
    tile, split = attention_order.BLOCK_S, attention_order.SPLIT
    edges = {1, tile - 1, tile, tile + 1, split - 1, split, split + 1, 2 * split + 1}
    assert edges <= set(attention_proof.lengths())
