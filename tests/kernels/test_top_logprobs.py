"""The ids listed as top logprobs: ties to the lowest id, whatever k a neighbour asks for."""

from __future__ import annotations

import pytest
import torch

from sgl_det.patches.logprobs import Ordered
from sgl_det.testing import assert_bitwise_equal


def logprobs() -> torch.Tensor:
    """Logprobs [130, 5000] of bf16 logits, which have many equal values."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(130, 5000, generator=generator).bfloat16().float()
    return logits.log_softmax(-1)


@pytest.mark.parametrize("k", [1, 5, 20])
def test_ties_go_to_the_lowest_id_for_every_k(k):
    x = logprobs()
    top = Ordered(x).topk(k, -1)
    expected = torch.sort(x, dim=-1, descending=True, stable=True)
    assert_bitwise_equal(top.values, expected.values[:, :k].contiguous())
    assert_bitwise_equal(top.indices, expected.indices[:, :k].contiguous())


def test_control_topk_lists_other_ids_for_another_k():
    x = logprobs()
    assert (x.topk(20, -1).indices[:, :5] != x.topk(5, -1).indices).any()
