"""One prompt a thousand times at temperature 0 under mixed load, by stock SGLang and by sgl_det.

usage: thousand.py --backend fa3 [--arms A,B] [--count N] [--tokens N] [--seconds N] --out FOLDER

The arms start side by side and are driven one after the other, while the others are stopped.
FOLDER/thousand.json is written after each arm. Exits 1 where sgl_det gave more than one completion.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import requests
from tqdm import tqdm

from sgl_det.bench import arms, thousand


def main() -> int:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `timeout`: stop the servers
    args.out.mkdir(parents=True, exist_ok=True)
    on_cpu = args.backend == arms.CPU_BACKEND
    settings = arms.Settings(
        backend=args.backend,
        model=args.model or ("demo" if on_cpu else "qwen3-8b"),
        pool=args.pool,
        logs=args.out,
        extra=tuple(shlex.split(args.server_args)),
    )
    experiment = thousand.Experiment(
        count=args.count,
        tokens=args.tokens,
        in_flight=args.in_flight,
        background=args.background,
        scale=args.scale or (32 if on_cpu else 1),
        seconds=args.seconds,
    )
    wanted = [a for a in args.arms.split(",") if a in arms.arms_of(args.backend)]
    bad, head = False, {"backend": settings.backend, "model": settings.model, "key": ""}
    for group in arms.groups(wanted, settings):
        bad |= measure(settings, experiment, group, head, args.out)
    return int(bad)


def measure(
    settings: arms.Settings,
    experiment: thousand.Experiment,
    group: Sequence[str],
    head: dict[str, str],
    out: Path,
) -> bool:
    """The arms of one group; True where sgl_det gave more than one completion.

    head: backend, model and numerics key, which is put there when our server tells it.
    """
    servers = {arm: settings.server(arm, "thousand") for arm in group}
    bad, machine = False, arms.machine()
    with arms.beside(servers) as (ready, failed):
        for arm, reason in failed.items():
            print(f"{arm} did not start and is left out: {reason}", flush=True)
        if arms.OURS in ready:
            told = requests.get(f"{servers[arms.OURS].url}/determinism", timeout=60).json()
            head["key"] = told["key"]
        up = {arm: servers[arm] for arm in ready}
        about = {arm: arms.about_server(s, settings.model) for arm, s in up.items()}
        for arm, server in up.items():
            with arms.alone(up, arm), tqdm(total=experiment.count, desc=arm) as bar:
                found = thousand.run(server.url, experiment, lambda n, b=bar: b.update(n - b.n))
            row = thousand.row(head, arm, experiment, found)
            row["command"] = about[arm]["command"]
            thousand.write(out, machine, [row])
            print(
                f"{arm}: {found['distinct']} distinct of {found['completions']} completions, first "
                f"divergence at token {found['first_divergence']}, {found['seconds']} s",
                flush=True,
            )
            bad |= arm == arms.OURS and found["distinct"] > 1
    return bad


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--backend", default="fa3")
    add("--model", help="default: qwen3-8b, on a CPU demo")
    add("--arms", default=",".join(arms.ARMS))
    add("--count", type=int, default=1000, help="completions of each arm")
    add("--tokens", type=int, default=1000, help="of each completion")
    add("--in-flight", type=int, default=104, help="most completions at once")
    add("--background", type=int, default=24, help="most requests of others at once")
    add("--scale", type=int, help="divide the background's lengths (on a CPU 32)")
    add("--pool", type=int, default=arms.POOL_TOKENS, help="KV tokens of each server")
    add("--seconds", type=float, help="send no copy after so long, in each arm")
    add("--server-args", default="", help="of SGLang, for all arms: --server-args='...'")
    add("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
