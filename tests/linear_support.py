"""Linear kernels in plain PyTorch, right ones and wrong ones, for tests that need no GPU."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import torch

from sgl_det.kernels import linear_proof, linear_setup, reference
from sgl_det.kernels.linear_candidates import Candidate, Shape

SHAPE = Shape(n=16, k=64, dtype=torch.float16)
EDGES = (1, 2, 4, 8)
_prove, _one_case = linear_proof.prove, linear_proof.one_case


def twin(x, weight, bias):
    """The canonical order: one accumulator over ascending k."""
    return reference.linear(x, weight, bias)


def halves(x, weight, bias):
    """K split in two, as by split-K."""
    half = x.shape[1] // 2
    one = reference.linear(x[:, :half], weight[:, :half], None, torch.float32)
    two = reference.linear(x[:, half:], weight[:, half:], None, torch.float32)
    return (one + two + (0 if bias is None else bias.float())).to(x.dtype)


def wrong_where(bad, wrong=halves):
    """A kernel that leaves the order for those (number of rows, first row) that ``bad`` names."""

    def run(x, weight, bias):
        first = x.storage_offset() // x.shape[1]
        return (wrong if bad(len(x), first) else twin)(x, weight, bias)

    return run


def kernel(name, run=twin, rows=(1, 1 << 30)):
    return Candidate(name=name, run=run, rows=rows)


class Timer:
    """Kernels take as many microseconds as `speeds` says."""

    speeds: dict[str, float] = {}
    short = 4

    def __init__(self, shape, most_rows):
        self.rows = most_rows

    def shortlist(self, candidates, m):
        assert 1 <= m <= self.rows
        return sorted(candidates, key=lambda c: self.speeds[c.name])[: self.short]

    def fastest(self, candidates, m):
        assert 1 <= m <= self.rows
        name = min((c.name for c in candidates), key=self.speeds.__getitem__)
        return name, self.speeds[name]


def on_cpu(monkeypatch, speeds, known=None, short=4):
    """Let `linear_setup` choose among kernels of this file; returns what it was asked.

    speeds   microseconds by name
    known    the kernels that there are
    short    how many of them a quick look keeps
    """
    asked = SimpleNamespace(proofs=0, deep_gemm=[], known=list(known or ()))

    def candidates(shape, *, deep_gemm):
        asked.deep_gemm.append(deep_gemm)
        return tuple(asked.known)

    def prove(*args, **kwargs):
        asked.proofs += 1
        return _prove(*args, device="cpu", reference=twin, dense=3, **kwargs)

    about = {"speeds": speeds, "short": short}
    monkeypatch.setattr(linear_setup, "candidates", candidates)
    monkeypatch.setattr(linear_setup, "Timer", type("Timed", (Timer,), about))
    monkeypatch.setattr(linear_proof, "prove", prove)
    monkeypatch.setattr(linear_proof, "canonical", twin)
    monkeypatch.setattr(linear_proof, "one_case", functools.partial(_one_case, device="cpu"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return asked
