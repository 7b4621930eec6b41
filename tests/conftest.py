"""What every test may use. Markers are declared in pyproject.toml."""

from __future__ import annotations

import functools

import pytest


def pytest_collection_modifyitems(items):
    """Tests that need a GPU are skipped where there is none; torch is loaded only to find out."""
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if not needing:
        return
    import torch

    if not torch.cuda.is_available():
        for item in needing:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture
def nan_filled_empty(monkeypatch):
    """Tensors from ``torch.empty`` and its kin hold NaN, so an unwritten output cannot pass.

    Integer tensors hold their type's largest value, booleans True.
    """
    import torch

    def filled(original):
        @functools.wraps(original)
        def make(*args, **kwargs):
            tensor = original(*args, **kwargs)
            with torch.no_grad():
                return tensor.fill_(_poison(tensor.dtype))

        return make

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, filled(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", filled(torch.Tensor.new_empty))


def _poison(dtype):
    import torch

    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


@pytest.fixture(scope="session")
def demo_model() -> str:
    """The folder of the demo model, made on first use."""
    from sgl_det.make_model import resolve_model

    return resolve_model("demo")
