"""Linear layers: each candidate beside torch's default, with its bits compared in the same run.

usage: bench_kernels.py --out FILE [--tp 1,2] [--dtype bf16,fp16] [--seconds 300]

FILE (`case_file`) is continued where it ends: a case that lies there already is not measured again.
All arms of a case run in turn, in CUDA graphs, over copies of the weight that together exceed the
L2 cache. `python -m benchmarks.kernels_json FILE ...` makes kernels.json of it.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from case_file import CaseFile
from graph_timing import Arm, copies, in_turn
from linear_shapes import ROWS, Layer, layers

from sgl_det.kernels import cublas
from sgl_det.kernels.linear_candidates import Candidate, Shape, candidates
from sgl_det.kernels.linear_data import KINDS
from sgl_det.kernels.linear_data import operands as data
from sgl_det.kernels.matmul import matmul
from sgl_det.kernels.proof_cache import machine

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BITS = f"the canonical order on {' and '.join(KINDS)} data"


class Operands:
    """Inputs of one layer: copies of the weight beyond the L2 cache, and the canonical results."""

    def __init__(self, layer: Layer, dtype: torch.dtype, rows: int):
        shape = Shape(n=layer.n, k=layer.k, dtype=dtype)
        self.cases = {kind: data(kind, shape, rows, "cuda") for kind in KINDS}
        self.expected = {kind: matmul(*case) for kind, case in self.cases.items()}
        self.x, weight, _ = self.cases["realistic"]
        again = copies(weight.numel() * weight.element_size()) - 1
        self.weights = [weight, *(weight.clone() for _ in range(again))]

    def mismatches(self, candidate: Candidate, m: int) -> int:
        """Elements that differ from the canonical ones, on both kinds of data."""
        count = 0
        with _split_k(candidate):
            for kind, (x, weight, _) in self.cases.items():
                y, expected = candidate.run(x[:m], weight, None), self.expected[kind][:m]
                count += int((y.view(torch.int16) != expected.view(torch.int16)).sum())
        return count


def _split_k(candidate: Candidate):
    """Only the baseline may split K."""
    return cublas.no_split_k() if candidate.name != "default" else nullcontext()


def _arm(candidate: Candidate, operands: Operands, m: int) -> Arm:
    x = operands.x[:m]
    with _split_k(candidate):
        calls = [partial(candidate.run, x, weight, None) for weight in operands.weights]
        return Arm(candidate.name, calls, partial(operands.mismatches, candidate, m))


def _default(x, weight, bias):
    return torch.nn.functional.linear(x, weight, bias)


def case(layer: Layer, dtype: torch.dtype, m: int, operands: Operands, args) -> dict:
    """Measure all arms at m rows."""
    shape = Shape(n=layer.n, k=layer.k, dtype=dtype)
    chosen = [
        c
        for c in candidates(shape, deep_gemm=True)
        if args.only in c.name and args.skip not in c.name
    ]
    arms = (Candidate(name="default", run=_default), *(c for c in chosen if c.offered(m)))
    return in_turn({c.name: partial(_arm, c, operands, m) for c in arms})


def line(entry: dict) -> str:
    """One line for people: the fastest bitwise arm beside the default."""
    n, k, m = entry["n"], entry["k"], entry["m"]
    base, base_bad = entry["arms"].get("default", (float("nan"), 0))
    good = {a: us for a, (us, bad) in entry["arms"].items() if not bad and a != "default"}
    bad = [a for a, (_, count) in entry["arms"].items() if count]
    if not good:
        return f"{entry['op']} {n}x{k} M={m}: nothing is bitwise"
    best = min(good, key=good.get)
    us, ranked = good[best], sorted(good.items(), key=lambda item: item[1])[:4]
    flop, size = 2 * m * n * k, 2 * (m * n + n * k + m * k)
    return (
        f"{entry['op']:8} {entry['dtype']} tp{entry['tp']} {n:6}x{k:5} M={m:4} {us:8.2f} us | "
        f"{flop / us / 1e6:6.1f} TFLOP/s | {size / us / 1e3:5.0f} GB/s | x{base / us:.3f} of "
        f"{base:.2f}{'*' if base_bad else ''} | {', '.join(f'{a} {u:.2f}' for a, u in ranked)}"
        f"{' | NOT BITWISE: ' + ', '.join(bad) if bad else ''}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tp", default="1")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--models", default="")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--only", default="", help="candidates whose name holds this")
    parser.add_argument("--skip", default="nothing", help="leave out those whose name holds this")
    parser.add_argument("--seconds", type=float, default=300)
    args = parser.parse_args()
    end, rows = time.monotonic() + args.seconds, [int(r) for r in args.rows.split(",")]
    models = tuple(args.models.split(",")) if args.models else None
    file = CaseFile(args.out, {"machine": machine(), "bits": BITS}, ("n", "k", "m", "dtype"))
    for dtype in args.dtype.split(","):
        for tp in map(int, args.tp.split(",")):
            for layer in layers(tp, models):
                about = {"n": layer.n, "k": layer.k, "dtype": dtype}
                left = [m for m in rows if about | {"m": m} not in file]
                if left and time.monotonic() < end:
                    _layer(layer, dtype, left, args, file, end)
    return 0


def _layer(layer: Layer, dtype: str, rows: list[int], args, file: CaseFile, end: float) -> None:
    operands = Operands(layer, DTYPES[dtype], max(rows))
    for m in rows:
        if time.monotonic() > end:
            return
        start = time.monotonic()
        found = case(layer, DTYPES[dtype], m, operands, args)
        entry = {"op": layer.op, "n": layer.n, "k": layer.k, "m": m, "dtype": dtype}
        entry |= {"tp": layer.tp, **found, "seconds": round(time.monotonic() - start, 2)}
        file.add(entry)
        sys.stdout.write(line(entry) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
