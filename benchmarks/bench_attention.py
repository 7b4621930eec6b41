"""Attention alone: ours beside the backend's own kernel in normal mode, with the bits compared.

usage: bench_attention.py --out FILE [--backend triton] [--shape qwen3-8b] [--seconds 200]

The lines of FILE (`case_file`): op is "triton decode", "fa3 prefill" and the like, m the number of
requests, n their keys, k the head size; for the arms see `attention_arms`. FILE is what
`kernels_json` makes the rows of.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from attention_arms import arms_of
from attention_case import SHAPES
from case_file import CaseFile, upstream
from graph_timing import in_turn

from sgl_det.kernels.attention_order import arch_of
from sgl_det.kernels.attention_orders import in_use
from sgl_det.kernels.proof_cache import machine

# 256 x 32768 keys of one layer would be 34 GB, and SGLang's kernel counts in 32 bits.
DECODE = [(b, n) for b in (1, 4, 16, 64, 256) for n in (512, 2048, 8192, 32768)][:-1]
# Up to 512 keys FlashInfer prefills with its own kernel.
PREFILL = [(16, 512), (8, 1024), (2, 4096), (1, 16384)]
FIELDS = ("op", "m", "n", "k", "dtype", "tp", "shape")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--backend", default="triton", choices=("triton", "flashinfer", "fa3"))
    parser.add_argument("--shape", default="qwen3-8b", choices=SHAPES)
    parser.add_argument("--seconds", type=float, default=200)
    args = parser.parse_args()
    device, d = torch.device("cuda"), SHAPES[args.shape][2]
    order = in_use(args.backend, d=d, dtype=torch.bfloat16, arch=arch_of(device))
    # The bits follow the sources of attention, and not those of the linear layers.
    here = machine() | upstream() | {"sources": order["attention_sources"]}
    header = {"machine": here, "bits": "ours in every way, prefill against decode"}
    file, end = CaseFile(args.out, header, FIELDS), time.monotonic() + args.seconds
    plan = [("prefill", m, n) for m, n in PREFILL] + [("decode", m, n) for m, n in DECODE]
    for op, m, n in plan:
        entry = {"op": f"{args.backend} {op}", "m": m, "n": n, "k": SHAPES[args.shape][2]}
        entry |= {"dtype": "bf16", "tp": 1, "shape": args.shape}
        if entry in file or time.monotonic() > end:
            continue
        entry |= in_turn(arms_of(args.backend, op, args.shape, m, n))
        file.add(entry)
        sys.stdout.write(json.dumps(entry) + "\n")
        sys.stdout.flush()
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
