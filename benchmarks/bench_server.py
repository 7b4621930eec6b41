"""One backend's server against its own normal mode: throughput, decode and prefill.

usage: bench_server.py --backend fa3 [--workloads A,B] [--seconds N] [--capacity] --out FILE

Both servers run side by side on one GPU, with equal and bounded KV pools, and are driven in turn.
First a quick probe of ours gives the verdict beside the figures: where it is not bitwise, no ratio
is written. Beside FILE lie a line for each measurement as it comes (.jsonl), both logs and the
answer of /determinism; FILE is written anew after each workload, so that a run may be cut short.
Every workload has its first rounds before any has its last ones.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import requests
from server_rounds import DEFAULT, WORKLOADS, Bench

from sgl_det.make_model import resolve_model
from sgl_det.probe import run_probe
from sgl_det.server_process import ServerProcess, running

POOL_TOKENS = 160_000  # two servers of the Qwen3-8B shape fit on one H200
BATCH = ("--max-running-requests", "128", "--cuda-graph-max-bs-decode", "128")
SHARED = ("--mem-fraction-static", "0.9")
# In bf16 two logits of the made-up models for a CPU are often equal, and the verdict is of ties.
CPU = ("--device", "cpu", "--sleep-on-idle", "--dtype", "float32")
MODULES = {"normal": "sgl_det.stock", "sgl_det": "sgl_det.launch_server"}
VERDICT_AXES = ("run_to_run", "batch_size", "batch_composition", "chunked_prefill")
VERDICT_SECONDS = 45.0


def about_server(server: ServerProcess, model: str) -> dict[str, Any]:
    """A running server's command line and settings; the folder of the model goes by its name."""
    info = requests.get(f"{server.url}/server_info", timeout=60).json()
    found = {"command": " ".join(server.command[1:]).replace(resolve_model(model), model)}
    names = ("max_total_num_tokens", "chunked_prefill_size", "disable_radix_cache")
    return found | {name: info.get(name) for name in names}


def memory_of(server: ServerProcess) -> Any:
    """What SGLang says of its memory, in GB; wrong where another server starts beside it."""
    info = requests.get(f"{server.url}/server_info", timeout=60).json()
    return info["internal_states"][0].get("memory_usage")


def capacity(arms: dict[str, ServerProcess], model: str, begun: float) -> dict[str, dict[str, Any]]:
    """What each arm has alone on the GPU without a bound: KV tokens, and memory left in GB."""
    found = {}
    for arm, server in arms.items():
        with running([server], 400):
            found[arm] = about_server(server, model) | {"memory_gb": memory_of(server)}
        left = re.findall(r"available_\w+_mem=([\d.]+)", server.log.read_text(errors="replace"))
        found[arm]["available_gb"] = float(left[-1]) if left else None
        print(f"capacity {arm}: {found[arm]} ({time.monotonic() - begun:.0f} s)", flush=True)
    return found


def verdict(url: str, seconds: float) -> str:
    """bitwise, diverged or not tested: the quick probe of our server on some axes."""
    report = run_probe(url, quick=True, axes=VERDICT_AXES, progress=False, limit_s=seconds)
    print(report.table(), flush=True)
    if any(r.failed and r.mismatches for r in report.rows):
        return "diverged"
    return "bitwise" if report.passed else "not tested"


def main() -> int:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `timeout`: stop the servers
    begun = time.monotonic()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"model": args.model}
    if args.workloads:
        measure(args, begun, result)
    if args.capacity:
        result["capacity"] = capacity(servers(args, "capacity", ()), args.model, begun)
        write(args.out, result)
    return int(any(r["verdict"] != "bitwise" for r in result.get("rows", ())))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="fa3")
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--workloads", default=",".join(DEFAULT), help=", ".join(WORKLOADS))
    parser.add_argument("--rounds", type=int, help="instead of each workload's own number")
    parser.add_argument("--seconds", type=float, help="begin no round that may end later")
    parser.add_argument("--pool", type=int, default=POOL_TOKENS, help="KV tokens of each server")
    parser.add_argument("--scale", type=int, default=1, help="divide all sizes, for a CPU")
    parser.add_argument("--capacity", action="store_true", help="each arm alone, without a bound")
    parser.add_argument("--disable-prefill-cuda-graph", action="store_true", help="in both arms")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("ours", nargs="*", help="more arguments for our server")
    args = parser.parse_args()
    args.workloads = [name for name in args.workloads.split(",") if name]
    if unknown := set(args.workloads) - set(WORKLOADS):
        parser.error(f"no workload is named {', '.join(sorted(unknown))}")
    return args


def servers(args: argparse.Namespace, what: str, pool: tuple[str, ...]) -> dict[str, ServerProcess]:
    """Both arms, not started."""
    argv = ("--model-path", resolve_model(args.model), "--attention-backend", args.backend)
    argv = (*argv, *pool, *BATCH, "--skip-server-warmup")
    argv += CPU if args.backend == "torch_native" else ()
    argv += ("--disable-prefill-cuda-graph",) if args.disable_prefill_cuda_graph else ()
    return {
        arm: ServerProcess(
            module,
            (*argv, *(args.ours if arm == "sgl_det" else ())),
            log=args.out.with_suffix(f".{what}.{arm}.log"),
        )
        for arm, module in MODULES.items()
    }


def measure(args: argparse.Namespace, begun: float, result: dict[str, Any]) -> None:
    """Both arms side by side: fills the result, which is written after each workload."""
    pool = ("--max-total-tokens", str(args.pool // args.scale), *SHARED)
    arms = servers(args, "server", pool)
    deadline = None if args.seconds is None else begun + args.seconds
    workloads = {name: WORKLOADS[name].scaled(args.scale) for name in args.workloads}
    if args.rounds:
        workloads = {name: replace(w, rounds=args.rounds) for name, w in workloads.items()}
    lines = args.out.with_suffix(".jsonl")
    lines.unlink(missing_ok=True)
    bench = Bench({arm: s.url for arm, s in arms.items()}, workloads, lines, deadline)
    with running(arms.values(), 400):
        about = requests.get(f"{arms['sgl_det'].url}/determinism", timeout=60).json()
        args.out.with_suffix(".determinism.json").write_text(json.dumps(about, indent=1))
        result |= {"gpu": about["numerics"]["gpu"], "ready_s": round(time.monotonic() - begun, 1)}
        result |= {"proof_s": about["kernels"].get("seconds")}
        result["servers"] = {arm: about_server(s, args.model) for arm, s in arms.items()}
        result["workloads"] = {name: asdict(w) for name, w in workloads.items()}
        head = {"backend": args.backend, "key": about["key"]}
        head["verdict"] = verdict(arms["sgl_det"].url, VERDICT_SECONDS)
        bench.warm_up(args.scale)
        for name, rounds in bench.schedule():
            bench.run(name, rounds)
            result |= {"rows": bench.rows(head), "skipped_rounds": bench.skipped}
            write(args.out, result)
            rows = [json.dumps(r) for r in result["rows"] if r["workload"] == name]
            print(*rows or [f"{name}: no round, for lack of time"], flush=True)


def write(out: Path, result: dict[str, Any]) -> None:
    """The result so far, over what lies there."""
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
