"""What an idle server on a CPU repeats: the same bits time after time, or every claim ends."""

from __future__ import annotations

import pytest
import torch

from sgl_det.kernels import canary, cpu, cpu_canary, proof

HEADS = (4, 2, 64, 64, torch.bfloat16)
KINDS = {"the linear layer 70x96": "linear", "attention": "attention", "rms_norm": "rms_norm"}


@pytest.fixture
def cases(monkeypatch):
    """The cases of a small model, in a process in which nothing was proven or broken before."""
    monkeypatch.setattr(proof, "BROKEN", [])
    monkeypatch.setattr(proof, "PROVEN", {})
    yield cpu_canary.cases([torch.randn(70, 96).bfloat16()], HEADS)
    canary.stop()


def test_cases_hold_and_do_not_see_new_weights(monkeypatch):
    weight = torch.randn(70, 96).bfloat16()
    found = cpu_canary.cases([weight], HEADS)
    assert len(found) == 4
    weight.zero_()
    assert [case.differs() for case in found for _ in range(2)] == [""] * 8


@pytest.mark.parametrize("what, kernel", KINDS.items(), ids=KINDS.values())
def test_another_kernel_is_seen(cases, monkeypatch, what, kernel):
    """One bit of one value is enough; the cases of other kernels still hold."""
    original = getattr(cpu, kernel)

    def other(*args, **kwargs):
        y = original(*args, **kwargs)
        y.view(torch.uint8).flatten()[0] ^= 1
        return y

    monkeypatch.setattr(cpu, kernel, other)
    differing = [case.what for case in cases if case.differs()]
    assert len(differing) == 1 and differing[0].startswith(what)


def test_a_mismatch_ends_the_claims(cases, monkeypatch):
    monkeypatch.setattr(proof.SETTINGS, "canary_s", 1e-9)
    canary.watch(cases)
    assert [canary.tick() for _ in cases] == [True] * 4 and proof.BROKEN == []
    monkeypatch.setattr(cpu, "linear", lambda *args: torch.zeros(5, 40))
    assert canary.tick()
    (sentence,) = proof.BROKEN
    assert "the linear layer 70x96" in sentence and "of 800 bytes differ" in sentence
    assert proof.PROVEN["canary"] == {"cases": 5, "mismatches": 1, "watched": 4}


def test_none_is_repeated_where_the_setting_says_so(cases, monkeypatch):
    monkeypatch.setattr(proof.SETTINGS, "canary_s", 0)
    canary.watch(cases)
    assert not canary.tick() and proof.PROVEN["canary"]["watched"] == 0
