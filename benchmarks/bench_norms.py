"""Norms: our kernel beside the fused one of SGLang, with the bits compared in the same run.

usage: bench_norms.py --out FILE [--dtype bf16,fp16] [--seconds 120]

The lines of FILE (`case_file`) are those of bench_kernels.py: n is the length of a row (all heads
of queries and keys for qk_norm), k is 0, m is the number of rows. A kernel's bits are right if no
row changes with the number of rows, from above the m before up to m: first, in the middle and last
among more. Operands are rotated beyond the L2 cache; 64 copies of a small case do not exceed it:
they stay there, where a server has them from the layer before.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from case_file import CaseFile, upstream
from graph_timing import Arm, copies, in_turn
from linear_shapes import MODELS, ROWS

from sgl_det import kernels
from sgl_det.kernels import proof_cache, row_proof
from sgl_det.kernels.rms_norm import fused_add_rms_norm, rms_norm, rms_norm_heads

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
EPS = 1e-6
BITS = "each row's own, whatever the number of rows"
_SOURCES = ("order.py", "rms_norm.py", "row_sum.py")
Run = Callable[..., row_proof.Rows]


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm over rows of d elements; heads: of queries and of keys, for qk_norm."""

    op: str
    d: int
    heads: tuple[int, int] = (0, 0)

    @property
    def n(self) -> int:
        return self.d * (sum(self.heads) or 1)


def norms() -> Iterator[Norm]:
    """The norms of the models, each once. Llama has none of queries and keys."""
    for hidden in sorted({hidden for hidden, *_ in MODELS.values()}):
        yield Norm("rms_norm", hidden)
        yield Norm("fused_add_rms_norm", hidden)
    for name, (_, _, heads, kv_heads, dim, _) in MODELS.items():
        if name.startswith("qwen3"):
            yield Norm("qk_norm", dim, (heads, kv_heads))


def operands(norm: Norm, dtype: torch.dtype, rows: int) -> row_proof.Rows:
    """x; x and residual; or the output [rows, q k v] of a layer that holds queries and keys."""
    source = torch.Generator("cuda").manual_seed(0)
    width = norm.n + norm.d * norm.heads[1]
    return tuple(
        torch.empty((rows, width), dtype=dtype, device="cuda").normal_(generator=source)
        for _ in range(2 if norm.op == "fused_add_rms_norm" else 1)
    )


def fused(norm: Norm, weight: torch.Tensor) -> Run:
    """The kernel that SGLang calls."""
    if norm.op == "qk_norm":
        from sglang.kernels.ops.layernorm.norm import fused_inplace_qknorm

        return _on_heads(norm, lambda q, k: fused_inplace_qknorm(q, k, weight, weight, EPS))
    import sgl_kernel

    if norm.op == "rms_norm":
        return lambda x: (sgl_kernel.rmsnorm(x, weight, EPS),)
    return _in_place(lambda x, residual: sgl_kernel.fused_add_rmsnorm(x, residual, weight, EPS))


def ours(norm: Norm, weight: torch.Tensor) -> Run:
    """The kernel of this package."""
    if norm.op == "qk_norm":
        return _on_heads(norm, lambda q, k: rms_norm_heads(q, k, weight, weight, EPS))
    if norm.op == "rms_norm":
        return lambda x: (rms_norm(x, weight, EPS),)
    return _in_place(lambda x, residual: fused_add_rms_norm(x, residual, weight, EPS))


def _in_place(call: Callable[..., None]) -> Run:
    def run(*tensors):
        call(*tensors)
        return tensors

    return run


def _on_heads(norm: Norm, call: Callable[..., None]) -> Run:
    def run(qkv):
        sizes = [h * norm.d for h in (*norm.heads, norm.heads[1])]
        q, k = (x.view(len(qkv), -1, norm.d) for x in qkv.split(sizes, dim=-1)[:2])
        call(q, k)
        return q, k

    return run


KERNELS = {"fused": fused, "sgl_det": ours}


def check_near(results: row_proof.Rows, expected: row_proof.Rows) -> None:
    """Raise ValueError unless two kernels computed the same, but for rounding."""
    for a, b in zip(results, expected, strict=True):
        if not ((a.float() - b.float()).abs() <= 2**-6 * b.float().abs() + 2**-10).all():
            raise ValueError("the kernels do not compute the same")


class Operands:
    """Inputs of one norm, one row more than are asked for, and its kernels' arms."""

    def __init__(self, norm: Norm, dtype: torch.dtype, rows: int):
        self.norm, self.inputs = norm, operands(norm, dtype, rows + 1)
        self.weight = torch.linspace(0.5, 1.5, norm.d, dtype=dtype, device="cuda")

    def arm(self, name: str, before: int, m: int) -> Arm:
        run = KERNELS[name](self.norm, self.weight)
        check_near(run(*self.rows(8)), ours(self.norm, self.weight)(*self.rows(8)))
        count = copies(sum(t[:m].numel() * t.element_size() for t in self.inputs))
        calls = [partial(run, *self.rows(m)) for _ in range(count)]
        return Arm(name, calls, partial(self.differs, name, run, before, m))

    def differs(self, name: str, run: Run, before: int, m: int) -> int:
        """1 where a row depends on the number of rows, else 0."""
        tried = [r for r in row_proof.ROWS if before < r < m]
        found = row_proof.first_mismatch(run, self.inputs, (*tried, m))
        if found:
            sys.stdout.write(f"{name}: {found}\n")
        return int(bool(found))

    def rows(self, m: int) -> row_proof.Rows:
        """A copy of the first m rows."""
        return tuple(t[:m].clone() for t in self.inputs)


def line(entry: dict[str, Any]) -> str:
    """One line for people: both kernels and their ratio."""
    times = {name: us for name, (us, _) in entry["arms"].items()}
    bad = [name for name, (_, count) in entry["arms"].items() if count]
    ratio = f"x{times['fused'] / times['sgl_det']:.3f}" if len(times) == 2 else entry["errors"]
    return (
        f"{entry['op']:18} {entry['dtype']} n={entry['n']:5} M={entry['m']:4} | "
        f"{', '.join(f'{name} {us:.2f} us' for name, us in times.items())} | {ratio}"
        f"{' | NOT BITWISE: ' + ', '.join(bad) if bad else ''}"
    )


def machine() -> dict[str, Any]:
    """`proof_cache.machine`, with the sources of our norms and the packages of the fused ones."""
    folder = Path(kernels.__file__).parent
    text = b"".join((folder / name).read_bytes() for name in _SOURCES)
    return proof_cache.machine() | upstream() | {"sources": hashlib.sha256(text).hexdigest()[:16]}


def _norm(norm: Norm, dtype: str, rows: list[int], file: CaseFile, end: float) -> None:
    about = {"op": norm.op, "n": norm.n, "k": 0, "dtype": dtype, "tp": 1}
    pairs = zip([0, *rows], rows, strict=False)
    left = [(before, m) for before, m in pairs if about | {"m": m} not in file]
    if not left or time.monotonic() > end:
        return
    case = Operands(norm, DTYPES[dtype], rows[-1])
    for before, m in left:
        if time.monotonic() > end:
            return
        start = time.monotonic()
        entry = about | {"m": m}
        entry |= in_turn({name: partial(case.arm, name, before, m) for name in KERNELS})
        file.add(entry | {"seconds": round(time.monotonic() - start, 2)})
        sys.stdout.write(line(entry) + "\n")
        sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--only", default="", help="norms whose name holds this")
    parser.add_argument("--seconds", type=float, default=120)
    args = parser.parse_args()
    end, rows = time.monotonic() + args.seconds, sorted(int(r) for r in args.rows.split(","))
    header = {"machine": machine(), "bits": BITS}
    file = CaseFile(args.out, header, ("op", "n", "m", "dtype"))
    for dtype in args.dtype.split(","):
        for norm in norms():
            if args.only in norm.op:
                _norm(norm, dtype, rows, file, end)
    return 0


if __name__ == "__main__":
    sys.exit(main())
