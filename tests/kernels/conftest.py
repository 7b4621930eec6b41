"""Fixtures of the kernels' tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def one_thread():
    """One thread and one seed at the start of each test; the threads of before at its end."""
    import torch

    before = torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
