"""One backend's server against its own normal mode: decode at batch 1 and 16, and prefill.

usage: bench_server.py --backend fa3 [--model qwen3-8b] [--rounds 5] --out FILE

Both servers run side by side on one GPU, with equal and bounded KV pools, and are driven in turn. A
quick probe of ours gives the verdict beside the figures; where it is red, no ratio is written.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

import requests

from sgl_det.make_model import resolve_model
from sgl_det.probe import run_probe
from sgl_det.server_process import ServerProcess, running

POOL = ("--max-total-tokens", "160000", "--max-running-requests", "128")
POOL = (*POOL, "--mem-fraction-static", "0.9", "--cuda-graph-max-bs-decode", "128")
SPEED = ("--disable-prefill-cuda-graph", "--skip-server-warmup")
ARMS = {"normal": "sgl_det.stock", "sgl_det": "sgl_det.launch_server"}
# name -> (requests at once, prompt tokens, new tokens)
WORKLOADS = {
    "decode_bs1": (1, 128, 256),
    "decode_bs16": (16, 128, 256),
    "prefill_256x1024": (256, 1024, 1),
}
VERDICT_AXES = ("run_to_run", "batch_size", "batch_composition", "chunked_prefill")


def seconds(url: str, workload: str, seed: int) -> float:
    """Wall-clock seconds of a workload on an empty cache; the seed decides the prompts."""
    many, prompt, new = WORKLOADS[workload]
    rng = random.Random(f"{seed} {workload}")
    requests.post(f"{url}/flush_cache", timeout=60).raise_for_status()
    body = {
        "input_ids": [[rng.randrange(100_000) for _ in range(prompt)] for _ in range(many)],
        "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
    }
    begun = time.perf_counter()
    requests.post(f"{url}/generate", json=body, timeout=300).raise_for_status()
    return time.perf_counter() - begun


def measure(servers: dict[str, ServerProcess], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds by workload and arm; the arms alternate, and the first round only warms up."""
    found = {w: {arm: [] for arm in servers} for w in WORKLOADS}
    for i in range(rounds + 1):
        for workload in WORKLOADS:
            for arm, server in servers.items():
                value = seconds(server.url, workload, i)
                if i:
                    found[workload][arm].append(value)
    return found


def rows(found: dict, backend: str, verdict: str, key: str) -> list[dict]:
    """One row a workload: medians, and the ratio normal / ours of the speeds, paired by round."""
    out = []
    for workload, arms in found.items():
        ratios = sorted(a / b for a, b in zip(arms["normal"], arms["sgl_det"], strict=True))
        row = {"backend": backend, "workload": workload, "verdict": verdict, "key": key}
        row |= {f"{arm}_s": round(statistics.median(v), 3) for arm, v in arms.items()}
        if verdict == "bitwise":
            row |= {"speed_ratio": round(statistics.median(ratios), 3)}
            row |= {"min": round(ratios[0], 3), "max": round(ratios[-1], 3)}
        out.append(row)
        print(json.dumps(row), flush=True)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="fa3")
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("ours", nargs="*", help="more arguments for our server")
    args = parser.parse_args()
    argv = ("--model-path", resolve_model(args.model), "--attention-backend", args.backend)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    servers = {
        arm: ServerProcess(
            module,
            (*argv, *POOL, *SPEED, *(args.ours if arm == "sgl_det" else ())),
            log=args.out.with_suffix(f".{arm}.log"),
        )
        for arm, module in ARMS.items()
    }
    with running(servers.values(), 400):
        about = requests.get(f"{servers['sgl_det'].url}/determinism", timeout=60).json()
        args.out.with_suffix(".determinism.json").write_text(json.dumps(about, indent=1))
        found = measure(servers, args.rounds)
        args.out.with_suffix(".seconds.json").write_text(json.dumps(found))
        report = run_probe(servers["sgl_det"].url, quick=True, axes=VERDICT_AXES, progress=False)
        print(report.table(), flush=True)
    verdict = "bitwise" if report.passed else "diverged"
    result = {"gpu": about["numerics"]["gpu"], "model": args.model, "rounds": args.rounds}
    result |= {"proof_s": about["kernels"]["seconds"]}
    result |= {"rows": rows(found, args.backend, verdict, about["key"])}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(not report.passed)


if __name__ == "__main__":
    sys.exit(main())
