"""Seconds that the start-up proof of a model's linear layers takes: first, and from its cache.

usage: bench_proof.py [--model qwen3-8b] [--out FILE]

The cache is the one that servers use, so a server started afterwards finds its proof there; "first"
is the time without a cache only where nothing was proven on this machine before.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from linear_shapes import MODELS, layers

from sgl_det import numerics
from sgl_det.config import cache_folder
from sgl_det.kernels.gpu_mode import MOST_ROWS
from sgl_det.kernels.linear_candidates import Shape
from sgl_det.kernels.linear_setup import set_up
from sgl_det.kernels.proof_cache import ProofCache, machine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-8b", choices=MODELS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shapes = [Shape(n=x.n, k=x.k, dtype=torch.bfloat16) for x in layers(1, (args.model,))]
    cache = ProofCache(cache_folder() / "proofs", machine())
    torch.zeros(1, device="cuda")
    about = {"gpu": machine()["gpu"], "key": numerics.key(machine()), "versions": machine()}
    result = about | {"model": args.model, "layers": len(shapes)}
    for name in ("first_s", "cached_s"):
        begun = time.perf_counter()
        found = set_up(shapes, cache=cache, most_rows=MOST_ROWS)
        torch.cuda.synchronize()
        result[name] = round(time.perf_counter() - begun, 2)
    result["kernels"] = {f"{s.n}x{s.k}": layer.report["buckets"] for s, layer in found.items()}
    print(json.dumps({k: v for k, v in result.items() if k not in ("kernels", "versions")}))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
