"""What the tests of the CPU kernels share."""

from __future__ import annotations

import pytest
import torch

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
EPSILON = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def spread(*shape, dtype=torch.float32):
    """Normal values over two decades: sums in another order lose other digits."""
    return (torch.randn(shape) * 10 ** (2 * torch.rand(shape) - 1)).to(dtype)
