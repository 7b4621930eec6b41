"""The patches of a model on a GPU: which layers they find, and what a patched function calls."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sgl_det.check import FITS, judge_all
from sgl_det.kernels import gpu_mode, sampler_proof
from sgl_det.kernels import linear as linear_module
from sgl_det.kernels.linear_candidates import Shape
from sgl_det.patches import for_backend, gpu
from sgl_det.testing import assert_bitwise_equal

BF16 = torch.bfloat16


class VocabParallelEmbedding(nn.Module):
    """As SGLang's: a table of rows to look up, that is also an output projection."""

    def __init__(self, n, k, bias=False):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n, k, dtype=BF16), requires_grad=False)
        if bias:
            self.bias = nn.Parameter(torch.zeros(n, dtype=BF16), requires_grad=False)


class ParallelLMHead(VocabParallelEmbedding):
    """As SGLang's: of the embedding's class, and a linear layer."""


class Layer(nn.Module):
    """As SGLang's linear layers: the bias is None where there is none."""

    def __init__(self, n, k, bias=False):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n, k, dtype=BF16), requires_grad=False)
        made = nn.Parameter(torch.zeros(n, dtype=BF16), requires_grad=False) if bias else None
        self.register_parameter("bias", made)


class Model(nn.Module):
    """Two equal blocks of two layers and a norm, between an embedding and an output projection."""

    def __init__(self, head=None):
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(100, 16)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"qkv": Layer(48, 16, bias=True), "o": Layer(16, 32), "norm": Norm(16)})
            for _ in range(2)
        )
        self.conv = nn.Conv1d(4, 4, 3)
        self.lm_head = self.embed_tokens if head is None else head


class Norm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))


QKV, OUT = Shape(n=48, k=16, dtype=BF16, bias=True), Shape(n=16, k=32, dtype=BF16)
EMBEDDING = Shape(n=100, k=16, dtype=BF16)


@pytest.fixture
def shapes(monkeypatch):
    """`_shapes` of a model of these classes; importing SGLang takes half a minute."""
    module = SimpleNamespace(VocabParallelEmbedding=VocabParallelEmbedding)
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.vocab_parallel_embedding", module)
    return lambda model: list(gpu._shapes(model))


def test_linear_layers_are_found_with_their_biases(shapes):
    found = shapes(Model(ParallelLMHead(128, 16)))
    assert found == [QKV, OUT, QKV, OUT, Shape(n=128, k=16, dtype=BF16)]


def test_a_bias_of_the_output_projection_is_seen(shapes):
    found = shapes(Model(ParallelLMHead(128, 16, bias=True)))
    assert found[-1] == Shape(n=128, k=16, dtype=BF16, bias=True)


def test_a_tied_embedding_is_a_layer_once(shapes):
    assert sorted(map(str, shapes(Model()))) == sorted(map(str, [EMBEDDING, QKV, OUT, QKV, OUT]))


def test_an_embedding_is_a_layer_where_there_is_no_other_projection(shapes):
    model = Model(ParallelLMHead(128, 16))
    assert EMBEDDING not in shapes(model)
    del model.lm_head
    assert sorted(map(str, shapes(model))) == sorted(map(str, [EMBEDDING, QKV, OUT, QKV, OUT]))


def test_shapes_are_those_of_the_loaded_weights(shapes):
    """As where tensor parallelism or a padded vocabulary made them other than the config's."""
    model = Model(ParallelLMHead(128, 16))
    model.lm_head.weight = nn.Parameter(torch.zeros(64, 16, dtype=torch.float16))
    assert shapes(model)[-1] == Shape(n=64, k=16, dtype=torch.float16)


def test_table_fits_what_is_installed():
    ours = gpu.patches()
    assert [v for v in judge_all(ours) if v.verdict != FITS] == []
    assert [p.name for p in ours] == [f"gpu.{row[0]}" for row in gpu._TABLE]


@pytest.mark.parametrize("backend", ["flashinfer", "fa3", "triton"])
def test_every_gpu_backend_has_them(backend):
    names = [p.name for p in for_backend(backend)]
    assert {p.name for p in gpu.patches()} <= set(names) and len(names) == len(set(names))


def test_the_cpu_backend_has_none():
    assert not {p.name for p in gpu.patches()} & {p.name for p in for_backend("torch_native")}


def replaced(name, original):
    """The replacement that the patch of this name makes."""
    (patch,) = (p for p in gpu.patches() if p.name == f"gpu.{name}")
    return patch.wrap(original)


@pytest.fixture
def asked(monkeypatch):
    """What our linear layer was asked; it answers with threes."""
    calls = []

    def linear(x, weight, bias=None):
        calls.append((x, weight, bias))
        return x.new_full((*x.shape[:-1], len(weight)), 3.0)

    monkeypatch.setattr(linear_module, "linear", linear)
    return calls


def never(*args, **kwargs):
    raise AssertionError("the original was called")


@pytest.mark.parametrize("bias", [None, torch.ones(48)], ids=["plain", "bias"])
def test_linear_layers_call_ours(asked, bias):
    layer, x = Layer(48, 16), torch.zeros(2, 5, 16)
    y = replaced("linear", never)(None, layer, x, bias)
    assert y.shape == (2, 5, 48)
    ((given, weight, given_bias),) = asked
    assert given is x and weight is layer.weight and given_bias is bias


def test_linear_layers_that_write_call_ours(asked):
    layer, x, out = Layer(48, 16), torch.zeros(5, 16), torch.zeros(5, 48)
    y = replaced("linear_into", never)(None, layer, x, out)
    assert y is out and len(asked) == 1
    assert_bitwise_equal(out, torch.full((5, 48), 3.0))


def test_mode_proves_the_loaded_layers_and_leaves_sglangs_off(shapes, monkeypatch):
    enabled = []
    monkeypatch.setattr(gpu_mode, "enable", lambda s, rows: enabled.append((list(s), rows)))
    monkeypatch.setattr(gpu.norms, "row_checks", lambda model, dtype: [("norm 16", dtype)])
    runner = SimpleNamespace(model=Model(), dtype=BF16)
    replaced("mode", never)(runner)
    ((layers, rows),) = enabled
    assert set(layers) == {EMBEDDING, QKV, OUT}
    assert rows == {"norm 16": BF16, "sampler": sampler_proof.check}
