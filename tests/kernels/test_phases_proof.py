"""The proof of a backend's phases: it passes one order, and names the phase that has another."""

from __future__ import annotations

import pytest
import torch

from sgl_det.kernels.attention_proof import Heads
from sgl_det.kernels.phases_proof import Step, first_mismatch, lengths

HEADS = Heads(queries=4, keys=2, d=8, dtype=torch.bfloat16)
LENGTHS = (1, 3, 4, 5, 9, 17, 30)


def row(q, k, v, split=1 << 30):
    """Attention [H, D] of one query over keys and values [n, G, D], merged over splits."""
    parts = []
    for at in range(0, len(k), split):
        some_k, some_v = (
            x[at : at + split].double().repeat_interleave(len(q) // x.shape[1], 1) for x in (k, v)
        )
        s = (q.double() * some_k).sum(-1)
        parts.append(((torch.softmax(s, 0)[..., None] * some_v).sum(0), torch.logsumexp(s, 0)))
    weights = torch.softmax(torch.stack([lse for _, lse in parts]), 0)[..., None]
    # A split's result is rounded, as kernels do, so that another split shows.
    values = torch.stack([o.to(q.dtype).double() for o, _ in parts])
    return (weights * values).sum(0).to(q.dtype)


def one_order(step: Step, split=None) -> torch.Tensor:
    """Each token over the keys before it; ``split`` of (new tokens, decode) -> keys a split."""
    out, at = [], 0
    for b, (n, new) in enumerate(zip(step.lengths, step.new, strict=True)):
        for i in range(new):
            slots = step.table[b, : n - new + i + 1].long()
            size = 8 if split is None else split(step, new, n)
            out.append(row(step.q[at], step.k[slots, 0], step.v[slots, 0], size))
            at += 1
    return torch.stack(out)


def test_one_order_passes():
    assert first_mismatch(one_order, HEADS, LENGTHS, "cpu") == ""


@pytest.mark.parametrize(
    "split, name",
    [
        (lambda step, new, n: 4 if step.decode else 8, "in decode alone"),
        (lambda step, new, n: 4 if step.decode and len(step.new) > 1 else 8, "in decode"),
        (lambda step, new, n: 4 if step.decode and len(step.new) == 2 else 8, "in decode of two"),
        # Of one length only, neither the shortest nor the longest.
        (lambda step, new, n: 4 if step.decode and step.lengths == [8] else 8, "in decode alone"),
        (lambda step, new, n: 4 if len(step.new) == 1 and not step.decode else 8, "alone"),
        (lambda step, new, n: 8 if new == n or step.decode else 4, "after a half of it"),
        (lambda step, new, n: 4 if step.decode and len(step.new) > 40 else 8, "of many"),
    ],
)
def test_control_another_order_is_found_and_named(split, name):
    found = first_mismatch(lambda step: one_order(step, split), HEADS, (1, 7, 8, 9, 17, 30), "cpu")
    assert "elements of a request of" in found and name in found


def test_a_table_holds_nothing_past_the_keys_that_could_be_read():
    """A kernel that reads one key too many is found."""

    def one_more(step: Step) -> torch.Tensor:
        if not step.decode:
            return one_order(step)
        return one_order(step._replace(lengths=[n + 1 for n in step.lengths], new=step.new))

    wide = (5, 9, 30)
    assert "in decode" in first_mismatch(one_more, HEADS, wide, "cpu")


def test_lengths_straddle_tiles_and_splits():
    edges = {1, 127, 128, 129, 257, 4095, 4096, 4097, 8193}
    assert edges <= set(lengths(128, 4096)) and max(lengths(128, 4096)) > 2 * 4096
