"""Traces as the profiler writes them, with kernel names that were read from the real libraries.

audit/known.tsv    rule and name, one a line: of torch 2.11, sglang-kernel 0.4.5, FlashInfer, ...
audit/unknown.tsv  a part of the reason and a name, one a line
"""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).with_name("audit")
PROOFS = {"linear": {}, "rows": {}}


def lines(name: str) -> list[tuple[str, str]]:
    """The lines of a table: (first column, raw kernel name)."""
    text = (HERE / name).read_text(encoding="utf-8")
    return [tuple(line.split("\t", 1)) for line in text.splitlines()]


def kernel(name: str, correlation: int, us: float = 1.0, cat: str = "kernel") -> dict:
    args = {"device": 0, "stream": 7, "correlation": correlation, "grid": [1, 1, 1]}
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 7, "dur": us, "args": args}


def launch(function: str, correlation: int) -> dict:
    args = {"cbid": 211, "correlation": correlation}
    return {"ph": "X", "cat": "cuda_runtime", "name": function, "dur": 3, "args": args}
