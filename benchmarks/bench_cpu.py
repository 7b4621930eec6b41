"""The CPU path against the same server unpatched: decode at batch 1 and 16, prefill of 1024 tokens.

usage: bench_cpu.py [--model cpu-mid] [--rounds 5] --out cpu.json

Both servers run side by side with one thread each and are driven in turn; the idle one is stopped
by SIGSTOP, because an idle scheduler polls. A short probe of our server gives the verdict that
stands beside the figures; where it is red, no ratio is written.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import requests
from tqdm import tqdm

from sgl_det.make_model import resolve_model
from sgl_det.probe import run_probe
from sgl_det.server_process import ServerProcess, running

FLAGS = (
    "--device",
    "cpu",
    "--attention-backend",
    "torch_native",
    "--dtype",
    "bfloat16",
    "--chunked-prefill-size",
    "1024",
    "--max-total-tokens",
    "32768",
    "--max-running-requests",
    "64",
    "--skip-server-warmup",
)
# name -> (requests at once, prompt tokens, new tokens)
WORKLOADS = {
    "decode_bs1": (1, 32, 48),
    "decode_bs16": (16, 32, 24),
    "prefill_1024": (1, 1024, 1),
}
VERDICT_AXES = ("batch_size", "chunked_prefill", "prefill_vs_decode")


def tokens_per_second(url: str, workload: str) -> float:
    """Decoded tokens, or prompt tokens where one token is asked for, over the wall-clock time."""
    batch, prompt, new = WORKLOADS[workload]
    requests.post(f"{url}/flush_cache", timeout=60)
    body = {
        "input_ids": [[(7 * i * j + i + j) % 250 for j in range(prompt)] for i in range(batch)],
        "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
    }
    begun = time.perf_counter()
    requests.post(f"{url}/generate", json=body, timeout=600).raise_for_status()
    count = batch * (prompt if new == 1 else new)
    return count / (time.perf_counter() - begun)


@contextmanager
def alone(servers: dict[str, ServerProcess], arm: str):
    """Only this arm's processes run."""
    others = [s for name, s in servers.items() if name != arm]
    trees = [psutil.Process(s.pid) for s in others]
    family = [p for root in trees for p in (root, *root.children(recursive=True))]
    for process in family:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in family:
            process.send_signal(signal.SIGCONT)


def row(workload: str, arm: str, values: list[float], key: str | None, verdict: str) -> dict:
    return {
        "backend": "torch_native",
        "workload": workload,
        "arm": arm,
        "metric": "tokens_per_second",
        "value": round(statistics.median(values), 2),
        "min": round(min(values), 2),
        "max": round(max(values), 2),
        "verdict": verdict,
        "key": key,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="cpu-mid")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    argv = ("--model-path", resolve_model(args.model), *FLAGS)
    env = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    logs = Path(tempfile.mkdtemp())
    servers = {
        "stock": ServerProcess("sgl_det.stock", argv, log=logs / "stock", env=env),
        "sgl_det": ServerProcess("sgl_det.launch_server", argv, log=logs / "ours", env=env),
    }
    found: dict[tuple[str, str], list[float]] = {}
    with running(servers.values()):
        for i in tqdm(range(args.rounds + 1), desc="rounds"):
            for arm, server in servers.items():
                with alone(servers, arm):
                    for workload in WORKLOADS:
                        value = tokens_per_second(server.url, workload)
                        if i:  # the first round warms up
                            found.setdefault((workload, arm), []).append(value)
        with alone(servers, "sgl_det"):
            report = run_probe(servers["sgl_det"].url, quick=True, axes=VERDICT_AXES)
        about = requests.get(f"{servers['sgl_det'].url}/determinism", timeout=60).json()
    verdict = "bitwise" if report.passed else "diverged"
    rows = []
    for (workload, arm), values in found.items():
        ours = arm == "sgl_det"
        line = row(workload, arm, values, about["key"] if ours else None, verdict if ours else "-")
        if ours and report.passed:
            pairs = zip(values, found[workload, "stock"], strict=True)
            ratios = sorted(a / b for a, b in pairs)
            line |= {"speed_ratio": round(statistics.median(ratios), 2)}
            line |= {
                "speed_ratio_min": round(ratios[0], 2),
                "speed_ratio_max": round(ratios[-1], 2),
            }
        rows.append(line)
        print(json.dumps(line), flush=True)
    head = {"cpu": about["recorded"]["cpu"], "arch": about["numerics"]["arch"], "threads": 1}
    head |= {"cores": os.cpu_count(), "model": args.model, "rounds": args.rounds}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    return int(not report.passed)


if __name__ == "__main__":
    sys.exit(main())
