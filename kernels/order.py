"""What decides a kernel's bits (ReductionOrder), and what may follow the batch (Tiling).

Two launches with equal orders agree bit for bit on every row they share. A property starts in the
order, and moves to the tiling only with a bitwise test that varies it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionOrder:
    """How one sum is associated.

    axis        letter of the summed axis in the kernel's legend: "K", "D", "S"
    block       elements a tile; tiles are added in ascending order
    split       elements a split (a fixed split size), or None for one pass
    lanes       partial sums kept side by side; element i belongs to lane i mod lanes
    num_warps   of the kernel, where they shape the sum; None on a CPU
    acc         dtype of the partial sums
    """

    axis: str
    block: int
    split: int | None = None
    lanes: int = 1
    num_warps: int | None = None
    acc: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How the rows of one launch are cut up; any choice gives the same bits.

    rows    rows of a register tile
    packed  whether the weights are turned into fp32 panels first
    chunk   rows for which a panel is packed once
    """

    rows: int
    packed: bool
    chunk: int


CPU = {
    "linear": ReductionOrder(axis="K", block=1),
    "scores": ReductionOrder(axis="D", block=1),
    "row_sum": ReductionOrder(axis="S", block=64, lanes=8),
    "values": ReductionOrder(axis="S", block=64),
    "rms_norm": ReductionOrder(axis="D", block=32, lanes=32),
}


def reduction_order(op: str, *, arch: str = "cpu") -> ReductionOrder:
    """The order of one sum. Raises ValueError on an op or an arch that has none."""
    if arch != "cpu" or op not in CPU:
        raise ValueError(f"no reduction order for {op!r} on {arch!r}; there are {', '.join(CPU)}")
    return CPU[op]


def tiling(m: int, *, wide: bool = False) -> Tiling:
    """The cut that the CPU's linear takes for ``m`` rows; ``wide``: with AVX-512."""
    tile = 12 if wide else 6
    return Tiling(rows=min(m, tile), packed=m > 4, chunk=32 * tile)


def straddles() -> tuple[int, ...]:
    """Numbers of rows on both sides of every edge of `tiling`, on any processor, ascending."""
    edges = {4}
    for wide in (False, True):
        t = tiling(1 << 20, wide=wide)
        edges |= {t.rows, 2 * t.rows, t.chunk}
    return tuple(sorted({1, 2, 3, *edges, *(e + 1 for e in edges)}))


def in_use(device: str) -> dict[str, str]:
    """The orders of the kernels that serve on a device, for the numerics key."""
    if device == "cuda":
        import torch

        from sgl_det.kernels import log_softmax, matmul, mean, rms_norm

        any_size, dtype = {"dtype": torch.bfloat16, "arch": 0}, torch.bfloat16
        return {
            "linear": str(matmul.reduction_order(n=4096, k=4096, **any_size)),
            "log_softmax": str(log_softmax.reduction_order(v=1 << 17, dtype=dtype)),
            "mean": str(mean.reduction_order(r=4096, dtype=dtype)),
            "rms_norm": str(rms_norm.reduction_order(d=4096, dtype=dtype)),
        }
    return {op: str(order) for op, order in CPU.items()}
