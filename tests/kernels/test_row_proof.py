"""The proof of operations on rows: what it finds, on functions in plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from sgl_det.kernels.row_proof import ROWS, first_mismatch

SIZES = (1, 2, 5, 9)


def values(dtype=torch.float32, rows=12):
    torch.manual_seed(0)
    return torch.randn(rows, 7).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_function_of_each_row_is_proven(dtype):
    def run(x, y):
        return x * 2 + y, x.t().contiguous().t()

    assert first_mismatch(run, (values(dtype), values(dtype)), SIZES) == ""


def test_arguments_may_be_overwritten():
    """As by norms in place: each run has copies of its own."""
    x = values()
    before = x.tolist()
    assert first_mismatch(lambda x: (x.add_(1.0), x.mul_(3.0)), (x,), SIZES) == ""
    assert x.tolist() == before


def seeing(bad):
    """A function that is off by one bit in the last column where ``bad(rows, first value)``."""

    def run(x):
        y = x.clone()
        if bad(len(x), x[0, 0].item()):
            y.view(torch.int32)[:, -1] ^= 1
        return x, y

    return run


@pytest.mark.parametrize("count", SIZES)
def test_every_number_of_rows_is_tried(count):
    found = first_mismatch(seeing(lambda rows, _: rows == count), (values(),), SIZES)
    assert found == f"{count} elements of result 1 differ at {count} rows from row 0"


@pytest.mark.parametrize("place", [0, 3, 7], ids=["first", "middle", "last"])
def test_every_place_of_the_rows_is_tried(place):
    x = values()
    at = x[place, 0].item()
    found = first_mismatch(seeing(lambda rows, first: rows == 5 and first == at), (x,), SIZES)
    assert found == f"5 elements of result 1 differ at 5 rows from row {place}"


def test_nan_and_the_sign_of_zero():
    x = torch.full((12, 3), float("nan"))
    assert first_mismatch(lambda x: (x * 1,), (x,), SIZES) == ""
    zero = torch.zeros(12, 3)
    found = first_mismatch(lambda x: (x if len(x) > 2 else -x,), (zero,), SIZES)
    assert found == "3 elements of result 0 differ at 1 rows from row 0"


def test_both_sides_of_the_usual_boundaries_are_tried():
    assert list(ROWS) == sorted(set(ROWS))
    for edge in (2, 4, 8, 16, 32, 64, 128, 256, 512):
        assert {edge - 1, edge, edge + 1} <= set(ROWS)
