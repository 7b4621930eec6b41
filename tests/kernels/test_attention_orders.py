"""What the numerics key says of attention."""

from __future__ import annotations

import pytest
import torch

from sgl_det.backend import BACKENDS
from sgl_det.kernels import attention_orders, flashinfer_order
from sgl_det.kernels.attention_orders import in_use

SIZES = {"d": 128, "dtype": torch.bfloat16, "arch": 90}


def test_backends_have_orders_and_sources_of_their_own():
    found = {name: in_use(name, **SIZES) for name in ("triton", "fa3", "flashinfer")}
    assert all({"attention", "attention_sources"} <= order.keys() for order in found.values())
    assert len({str(order) for order in found.values()}) == 3
    assert "attention_headers" in found["flashinfer"]
    assert in_use("torch_native", **SIZES) == {}


def test_what_decides_the_bits_changes_the_key(monkeypatch, tmp_path):
    before = in_use("flashinfer", **SIZES)
    monkeypatch.setattr(flashinfer_order, "SPLIT", 2048)
    assert in_use("flashinfer", **SIZES) != before
    find, sources = attention_orders._ORDERS["triton"]
    monkeypatch.setitem(attention_orders._ORDERS, "triton", (find, sources[1:]))
    assert in_use("triton", **SIZES)["attention_sources"] != before["attention_sources"]


@pytest.mark.parametrize("backend", ["triton", "fa3", "flashinfer"])
def test_a_backend_tells_the_split_of_its_order(backend):
    (split,) = set(BACKENDS[backend].split_tokens.values())
    assert f"split={split}," in in_use(backend, **SIZES)["attention"]


@pytest.mark.parametrize("backend", ["triton", "fa3", "flashinfer"])
def test_a_head_size_without_an_order_is_refused(backend):
    with pytest.raises(ValueError, match="no .*order for heads of 72"):
        in_use(backend, **{**SIZES, "d": 72})
