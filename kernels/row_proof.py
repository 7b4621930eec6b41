"""The proof that an operation on rows gives each row its bits whatever the other rows are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Rows = tuple[torch.Tensor, ...]
# Both sides of the sizes at which kernels change their grid, block or vector width.
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
ROWS = (*ROWS, 300, 511, 512, 513, 1000, 2047, 2049, 4096, 4097)


def first_mismatch(run: Callable[..., Rows], inputs: Rows, rows: Sequence[int] = ROWS) -> str:
    """Compare run(rows of the inputs) with the same rows of run(all rows); "" where bits agree.

    inputs   tensors [T, ...] with T above the largest number of rows
    run      takes as many tensors and returns tensors [rows, ...]; it may overwrite its arguments
    """
    most = len(inputs[0])
    expected = [_bits(t) for t in run(*(t.clone() for t in inputs))]
    for m in rows:
        for at in sorted({0, (most - m) // 2, most - m}):
            found = run(*(t[at : at + m].clone() for t in inputs))
            for i, (tensor, whole) in enumerate(zip(found, expected, strict=True)):
                count = int((_bits(tensor) != whole[at : at + m]).sum())
                if count:
                    return f"{count} elements of result {i} differ at {m} rows from row {at}"
    return ""


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view({2: torch.int16, 4: torch.int32}[t.element_size()])
