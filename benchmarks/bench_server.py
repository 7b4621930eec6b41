"""One backend's server against its own normal mode: throughput, decode and prefill.

usage: bench_server.py --backend fa3 [--workloads A,B] [--seconds N] [--capacity] --out FILE [-- ARGS]

Both servers run side by side on one GPU, with equal and bounded KV pools, and are driven in turn;
ARGS go to ours. First a quick probe of ours gives the verdict beside the figures: where it is not
bitwise, no ratio is written. Beside FILE lie a line for each measurement as it comes
(FILE.jsonl), both logs and ours' answer of /determinism; FILE is written anew after each workload,
so that a run may be cut short. Every workload has its first rounds before any has its last ones.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import requests

from sgl_det.make_model import resolve_model
from sgl_det.probe import run_probe
from sgl_det.server_process import ServerProcess, running

POOL_TOKENS = 160_000
BATCH = ("--max-running-requests", "128", "--cuda-graph-max-bs-decode", "128")
SHARED = ("--mem-fraction-static", "0.9")
CPU = ("--device", "cpu", "--sleep-on-idle")
ARMS = {"normal": "sgl_det.stock", "sgl_det": "sgl_det.launch_server"}
VERDICT_AXES = ("run_to_run", "batch_size", "batch_composition", "chunked_prefill")
VERDICT_SECONDS = 45.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is sent at once, and how often.

    cached   the prompts are in the prefix cache when they are measured: the figure is decode alone
    rounds   in all; with warm_up the first of them is not counted
    about_s  both arms on an H200, until a round was measured; the time limit goes by it
    """

    many: int
    prompt: int
    new: int
    cached: bool = False
    rounds: int = 4
    warm_up: bool = True
    about_s: float = 5.0

    def scaled(self, by: int) -> Workload:
        """A smaller one, for a machine without a GPU; equal for 1."""
        if by == 1:
            return self
        many, prompt, new = (-(-n // by) for n in (self.many, self.prompt, self.new))
        return replace(self, many=many, prompt=max(8, prompt), new=new, about_s=0.0)


WORKLOADS = {
    "decode_bs1": Workload(many=1, prompt=128, new=256),
    "decode_bs16": Workload(many=16, prompt=128, new=256),
    "decode_bs1_32k": Workload(many=1, prompt=32_768, new=256, cached=True),
    "decode_bs4_32k": Workload(many=4, prompt=32_768, new=256, cached=True, about_s=20.0),
    "prefill_8x16384": Workload(many=8, prompt=16_384, new=1, about_s=12.0),
    "throughput_256x1024": Workload(
        many=256, prompt=1024, new=1024, rounds=2, warm_up=False, about_s=65.0
    ),
    "prefill_256x1024": Workload(many=256, prompt=1024, new=1, about_s=13.0),
}
DEFAULT = [name for name in WORKLOADS if name != "prefill_256x1024"]
WARM_UP = Workload(many=32, prompt=512, new=16)


def send(url: str, w: Workload, seed: object, new: int | None = None) -> tuple[float, int]:
    """Wall-clock seconds of a workload in one request, and the fewest prompt tokens of any that
    came from the prefix cache. The seed decides the prompts."""
    rng = random.Random(str(seed))
    body = {
        "input_ids": [[rng.randrange(256) for _ in range(w.prompt)] for _ in range(w.many)],
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": new or w.new,
            "ignore_eos": True,
        },
    }
    begun = time.perf_counter()
    reply = requests.post(f"{url}/generate", json=body, timeout=600)
    seconds = time.perf_counter() - begun
    reply.raise_for_status()
    return seconds, min(r["meta_info"]["cached_tokens"] for r in reply.json())


def flush(url: str) -> None:
    """Empty a server's prefix cache."""
    requests.post(f"{url}/flush_cache?timeout=20", timeout=60).raise_for_status()


@dataclass
class Bench:
    """Drives both servers and keeps what was measured.

    workloads  name -> Workload, as they are measured
    deadline   of time.monotonic(): no round begins that may not end before; None for no limit
    measured   one record a measurement: workload, arm, round, seconds, warm_up, cached
    """

    urls: dict[str, str]
    workloads: dict[str, Workload]
    lines: Path
    deadline: float | None = None
    measured: list[dict[str, Any]] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)

    def warm_up(self) -> None:
        """Let both compile what their first requests compile."""
        w = WARM_UP if self.deadline is None else replace(WARM_UP, many=16)
        for url in self.urls.values():
            send(url, w, "warm up")

    def schedule(self) -> list[tuple[str, list[int]]]:
        """Which rounds of which workload, in order: one counted round of each, then the rest."""
        first = {name: 1 + w.warm_up for name, w in self.workloads.items()}
        whole = {name: list(range(w.rounds)) for name, w in self.workloads.items()}
        rest = [(name, whole[name][n:]) for name, n in first.items()]
        return [*((name, whole[name][:n]) for name, n in first.items()), *(r for r in rest if r[1])]

    def run(self, name: str, rounds: list[int]) -> None:
        """Rounds of one workload; the arms take turns."""
        w, about = self.workloads[name], self.workloads[name].about_s
        if w.cached and not self.late(about):
            for url in self.urls.values():
                flush(url)
                send(url, w, name, 1)
        for i, number in enumerate(rounds):
            if self.late(about):
                self.skipped[name] = self.skipped.get(name, 0) + len(rounds) - i
                return
            begun = time.monotonic()
            for arm, url in self.urls.items():
                if not w.cached:
                    flush(url)
                seconds, cached = send(url, w, name if w.cached else f"{number} {name}")
                self.record(name, arm, number, seconds, cached)
            about = time.monotonic() - begun

    def late(self, seconds: float) -> bool:
        """Whether what takes so long would end after the deadline."""
        return self.deadline is not None and time.monotonic() + seconds > self.deadline

    def record(self, name: str, arm: str, number: int, seconds: float, cached: int) -> None:
        """Keep a measurement, and write it down at once."""
        line = {"workload": name, "arm": arm, "round": number, "seconds": round(seconds, 4)}
        line |= {"warm_up": self.workloads[name].warm_up and number == 0, "cached": cached}
        self.measured.append(line)
        with self.lines.open("a") as out:
            print(json.dumps(line), file=out, flush=True)

    def rows(self, head: dict[str, str]) -> list[dict[str, Any]]:
        """One row a workload: medians, and the ratio normal / ours of the speeds, paired by round.

        Without a ratio where the verdict is not bitwise, or where prompts that should have come
        from the prefix cache did not.
        """
        return [r for name in self.workloads if (r := self._row(name, head))]

    def _row(self, name: str, head: dict[str, str]) -> dict[str, Any] | None:
        mine = [m for m in self.measured if m["workload"] == name and not m["warm_up"]]
        by = {arm: {m["round"]: m for m in mine if m["arm"] == arm} for arm in ARMS}
        both = sorted(set.intersection(*(set(found) for found in by.values())))
        if not both:
            return None
        seconds = {arm: [by[arm][n]["seconds"] for n in both] for arm in ARMS}
        row = {"backend": head["backend"], "workload": name, **head, "rounds": len(both)}
        row |= {f"{arm}_s": round(statistics.median(v), 3) for arm, v in seconds.items()}
        w = self.workloads[name]
        cold = {m["arm"] for m in mine if w.cached and m["cached"] < 0.9 * w.prompt}
        if cold:
            return row | {"note": f"{', '.join(sorted(cold))}: prompts not read from the cache"}
        if head["verdict"] == "bitwise":
            ratios = sorted(a / b for a, b in zip(*seconds.values(), strict=True))
            row |= {"speed_ratio": round(statistics.median(ratios), 3)}
            row |= {"min": round(ratios[0], 3), "max": round(ratios[-1], 3)}
        return row


def about_server(server: ServerProcess) -> dict[str, Any]:
    """A running server's command line, capacity and memory, as /server_info tells them."""
    info = requests.get(f"{server.url}/server_info", timeout=60).json()
    state = info["internal_states"][0]
    found = {"command": " ".join(server.command[1:])}
    names = ("max_total_num_tokens", "chunked_prefill_size", "disable_radix_cache")
    found |= {name: info.get(name) for name in names}
    return found | {"memory_gb": state.get("memory_usage")}


def capacity(arms: dict[str, ServerProcess], begun: float) -> dict[str, dict[str, Any]]:
    """What each arm has alone on the GPU without a bound: KV tokens, and memory left in GB."""
    found = {}
    for arm, server in arms.items():
        with running([server], 400):
            found[arm] = about_server(server)
        left = [
            x for x in server.log.read_text(errors="replace").split() if "available_gpu_mem=" in x
        ]
        found[arm]["available_gpu_mem_gb"] = left[-1].partition("=")[2].strip(",") if left else None
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
        result["capacity"] = capacity(servers(args, "capacity", ()), begun)
        write(args.out, result)
    return int(any(r["verdict"] != "bitwise" for r in result.get("rows", ())))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="fa3")
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--workloads", default=",".join(DEFAULT), help=", ".join(WORKLOADS))
    parser.add_argument("--rounds", type=int, help="instead of each workload's own number")
    parser.add_argument("--seconds", type=float, help="begin no round that may end later")
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
        for arm, module in ARMS.items()
    }


def measure(args: argparse.Namespace, begun: float, result: dict[str, Any]) -> None:
    """Both arms side by side: fills the result, which is written after each workload."""
    pool = ("--max-total-tokens", str(POOL_TOKENS // args.scale), *SHARED)
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
        result["servers"] = {arm: about_server(s) for arm, s in arms.items()}
        result["workloads"] = {name: asdict(w) for name, w in workloads.items()}
        head = {"backend": args.backend, "key": about["key"]}
        head["verdict"] = verdict(arms["sgl_det"].url, VERDICT_SECONDS)
        bench.warm_up()
        for name, rounds in bench.schedule():
            bench.run(name, rounds)
            result |= {"rows": bench.rows(head), "skipped_rounds": bench.skipped}
            write(args.out, result)
            print(f"{name}: {result['rows']}", flush=True)


def write(out: Path, result: dict[str, Any]) -> None:
    """The result so far, over what lies there."""
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
