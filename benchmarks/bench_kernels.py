"""Linear layers: each candidate beside torch's default, with its bits compared in the same run.

usage: bench_kernels.py --out FILE [--tp 1,2] [--dtype bf16,fp16] [--seconds 300]

FILE holds one JSON line a case and is continued where it ends: a case that lies there already is
not measured again. All arms of a case run in turn, in CUDA graphs, over copies of the weight that
together exceed the L2 cache. `python -m benchmarks.kernels_json` makes kernels.json of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from linear_shapes import ROWS, Layer, layers

from sgl_det.kernels import cublas
from sgl_det.kernels.linear_candidates import Candidate, Shape, candidates
from sgl_det.kernels.linear_data import KINDS
from sgl_det.kernels.linear_data import operands as data
from sgl_det.kernels.matmul import matmul

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDS, LEAST_US = 7, 250


class Operands:
    """Inputs of one layer: copies of the weight beyond the L2 cache, and the canonical results."""

    def __init__(self, layer: Layer, dtype: torch.dtype, rows: int):
        shape = Shape(n=layer.n, k=layer.k, dtype=dtype)
        self.cases = {kind: data(kind, shape, rows, "cuda") for kind in KINDS}
        self.expected = {kind: matmul(*case) for kind, case in self.cases.items()}
        self.x, weight, _ = self.cases["realistic"]
        self.copies = max(2, min(64, -(-200_000_000 // (weight.numel() * 2))))
        self.weights = [weight, *(weight.clone() for _ in range(self.copies - 1))]

    def mismatches(self, candidate: Candidate, m: int) -> int:
        """Elements that differ from the canonical ones, on both kinds of data."""
        count = 0
        for kind, (x, weight, _) in self.cases.items():
            y, expected = candidate.run(x[:m], weight, None), self.expected[kind][:m]
            count += int((y.view(torch.int16) != expected.view(torch.int16)).sum())
        return count


class Arm:
    """One kernel in a CUDA graph that calls it once with every copy of the weight."""

    def __init__(self, candidate: Candidate, operands: Operands, m: int):
        self.name, self.calls, xs = candidate.name, operands.copies, operands.x[:m]
        self.times: list[float] = []
        stream = torch.cuda.Stream()
        with cublas.no_split_k() if candidate.name != "default" else nullcontext():
            self.mismatches = operands.mismatches(candidate, m)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                candidate.run(xs, operands.weights[1], None)
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream):
                for weight in operands.weights:
                    candidate.run(xs, weight, None)

    def measure(self, repeats: int) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            self.graph.replay()
        end.record()
        end.synchronize()
        self.times.append(start.elapsed_time(end) * 1e3 / repeats / self.calls)

    @property
    def us(self) -> float:
        return statistics.median(self.times)


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
    offered = [c for c in chosen if c.offered(m)]
    arms, errors = [], {}
    for candidate in (Candidate(name="default", run=_default), *offered):
        try:
            arms.append(Arm(candidate, operands, m))
        except Exception as error:
            errors[candidate.name] = str(error).splitlines()[0][:120]
    for arm in arms:
        arm.measure(1)
    repeats = max(1, round(LEAST_US / max(1e-3, arms[0].times[-1] * arms[0].calls)))
    for arm in arms:
        arm.times.clear()
    for _ in range(ROUNDS):
        for arm in arms:
            arm.measure(repeats)
    return {
        "arms": {a.name: [round(a.us, 3), a.mismatches] for a in arms},
        "spread": round(max(max(a.times) / min(a.times) for a in arms) - 1, 3),
        "errors": errors,
    }


def line(entry: dict) -> str:
    """One line for people: the fastest bitwise arm beside the default."""
    n, k, m = entry["n"], entry["k"], entry["m"]
    base, base_bad = entry["arms"]["default"]
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
    args.out.touch()
    done = {tuple(json.loads(x)[f] for f in _ID) for x in args.out.read_text().splitlines()}
    for dtype in args.dtype.split(","):
        for tp in map(int, args.tp.split(",")):
            for layer in layers(tp, models):
                left = [m for m in rows if (layer.n, layer.k, m, dtype) not in done]
                if left and time.monotonic() < end:
                    _layer(layer, dtype, left, args, end)
    return 0


_ID = ("n", "k", "m", "dtype")


def _layer(layer: Layer, dtype: str, rows: list[int], args, end: float) -> None:
    operands = Operands(layer, DTYPES[dtype], max(rows))
    for m in rows:
        if time.monotonic() > end:
            return
        start = time.monotonic()
        found = case(layer, DTYPES[dtype], m, operands, args)
        entry = {"op": layer.op, "n": layer.n, "k": layer.k, "m": m, "dtype": dtype}
        entry |= {"tp": layer.tp, **found, "seconds": round(time.monotonic() - start, 2)}
        with args.out.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        sys.stdout.write(line(entry) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
