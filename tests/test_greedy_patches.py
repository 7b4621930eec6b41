"""Greedy rows beside rows that sample: the first of the largest logits, in any company."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sgl_det.check import FITS, judge_all
from sgl_det.patches import greedy

# Two ids share the largest logit of row 0; row 1 samples.
LOGITS = torch.tensor([[0.5, 2.0, -1.0, 2.0], [0.0, 1.0, 2.0, 3.0]])


class Sampler:
    """As SGLang's, whose sort may leave the last of equal ones in front."""

    def _preprocess_logits(self, logits, info):
        return logits

    def _sample_from_probs(self, probs, info, positions, simple):
        return torch.tensor([3, 2], dtype=torch.int32)[: len(probs)]

    def forward(self, info, simple=False):
        logits = greedy._largest(Sampler._preprocess_logits)(self, LOGITS.clone(), info)
        if info.is_all_greedy:
            return None
        probs = logits.copy_(torch.softmax(logits, -1))
        return greedy._sample(Sampler._sample_from_probs)(self, probs, info, None, simple)


def info(top_ks, greedy=False):
    heat = torch.full((len(top_ks), 1), 0.7)
    top_ks = torch.tensor(top_ks, dtype=torch.int32)
    return SimpleNamespace(is_all_greedy=greedy, top_ks=top_ks, temperatures=heat)


def test_greedy_rows_take_the_first_of_the_largest():
    found = Sampler().forward(info([1, 1 << 30]))
    assert found.tolist() == [1, 2] and found.dtype == torch.int32


def test_greedy_rows_have_the_log_probability_of_their_logits():
    """As in a batch of greedy rows alone, where SGLang divides by no temperature."""
    asked = info([1, 40])
    Sampler().forward(asked)
    assert asked.temperatures.flatten().tolist() == pytest.approx([1.0, 0.7])
    alone = info([1, 1], greedy=True)
    Sampler().forward(alone)
    assert alone.temperatures.flatten().tolist() == pytest.approx([0.7, 0.7])


def test_rows_that_sample_keep_what_they_drew():
    assert Sampler().forward(info([1 << 30, 40])).tolist() == [3, 2]
    assert Sampler().forward(info([1 << 30, 1 << 30]), simple=True).tolist() == [3, 2]


def test_a_greedy_batch_costs_nothing(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "argmax", lambda *_, **__: pytest.fail("was asked"))
    sampler = Sampler()
    assert sampler.forward(info([1, 1], greedy=True)) is None


def test_patches_fit_what_is_installed():
    assert [v for v in judge_all(greedy.patches()) if v.verdict != FITS] == []
