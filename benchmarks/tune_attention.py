"""Triton attention: sizes of tile and split, which fix the bits, and launches, which do not.

usage: tune_attention.py --out FILE [--seconds 80] [--processes 12]

Compiles every choice in processes side by side, then times them in turn beside SGLang's kernels. A
line of FILE is one case: {op, m, n, "order": [BLOCK_S, SPLIT], arms}. What is chosen from it goes
into `attention_order` (the order) and `attention`, `attention_decode` (the launches).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from functools import partial
from pathlib import Path

import torch
from attention_arms import not_compared
from attention_case import Case
from graph_timing import Arm, in_turn

from sgl_det.kernels.attention import Launch
from sgl_det.kernels.attention_decode import Launch as DecodeLaunch
from sgl_det.kernels.attention_order import Order

TILES, SPLITS = (64, 128), (512, 1024, 2048)
PREFILL = [(8, 1024), (1, 16384)]
DECODE = [(1, 512), (1, 32768), (16, 384), (16, 8192), (128, 1024), (256, 2048)]
PREFILL_LAUNCHES = [Launch(m, w, s) for m, w in ((64, 4), (64, 8), (128, 8)) for s in (2, 3, 5)]
DECODE_LAUNCHES = [(w, s) for w in (2, 4, 8) for s in (2, 3, 4, 5)]
PROGRAMS = (132, 264, 528)


def compile_some(shape: str, choices: list[tuple]) -> None:
    """Compile some choices by a call of each on a small case."""
    case = Case(shape, 2, 256, 256)
    for tile, split, launch in choices:
        case.take(Order(tile, split))
        try:
            if isinstance(launch, Launch):
                case.prefill(launch)
            else:
                for shared in (1, 2):
                    case.decode(shared, case.work, **_launch(launch))
        except Exception as error:  # too much shared memory: it is not timed either
            sys.stderr.write(f"{tile} {split} {launch}: {str(error).splitlines()[0][:100]}\n")
    torch.cuda.synchronize()


def _arms_of_prefill(case: Case) -> dict:
    arms = {"upstream": lambda: Arm("upstream", [case.upstream_prefill()] * 2, not_compared)}
    for launch in PREFILL_LAUNCHES:
        name = f"{launch.rows} rows w{launch.warps} s{launch.stages}"
        call = partial(case.prefill, launch)
        arms[name] = partial(Arm, name, [call] * 2, partial(case.differs, call))
    return arms


def _arms_of_decode(case: Case) -> dict:
    repeat = case.repeat
    arms = {"upstream": lambda: Arm("upstream", [case.upstream_decode()] * repeat, not_compared)}
    shares = {max(1, p // (case.m * case.groups)) for p in PROGRAMS}
    for shared in sorted({min(s, -(-case.n // case.order.split)) for s in shares} | {1}):
        for launch in DECODE_LAUNCHES:
            name = f"shared {shared} w{launch[0]} s{launch[1]}"
            call = partial(case.decode, shared, case.work, **_launch(launch))
            arms[name] = partial(Arm, name, [call] * repeat, partial(case.differs, call))
    return arms


def _launch(of: tuple[int, int]) -> dict[str, DecodeLaunch]:
    return {"launch": DecodeLaunch(*of)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--seconds", type=float, default=80)
    parser.add_argument("--processes", type=int, default=12)
    args = parser.parse_args()
    orders = [(tile, split) for tile in TILES for split in SPLITS]
    launches = [*PREFILL_LAUNCHES, *DECODE_LAUNCHES]
    choices = [(*o, launch) for o in orders for launch in launches]
    parts = [(args.shape, choices[i :: args.processes]) for i in range(args.processes)]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        begun = time.monotonic()
        pool.starmap(compile_some, parts)
    end = time.monotonic() + args.seconds
    sys.stdout.write(f"compiled in {time.monotonic() - begun:.0f} s\n")
    with args.out.open("a", encoding="utf-8") as file:
        for op, cases in (("prefill", PREFILL), ("decode", DECODE)):
            for m, n in cases:
                for entry in measured(op, args.shape, m, n, orders, end):
                    file.write(json.dumps(entry) + "\n")
                    file.flush()
    return 0


def measured(op: str, shape: str, m: int, n: int, orders, end: float):
    """The lines of one case, an order each; the fastest are printed."""
    case = Case(shape, m, n, n if op == "prefill" else 1)
    for tile, split in orders:
        if time.monotonic() > end:
            return
        case.take(Order(tile, split))
        arms = _arms_of_prefill(case) if op == "prefill" else _arms_of_decode(case)
        entry = {"op": op, "m": m, "n": n, "order": [tile, split], **in_turn(arms)}
        yield entry
        fast = sorted((us, name, bad) for name, (us, bad) in entry["arms"].items())[:5]
        sys.stdout.write(f"{op} {m}x{n} tile {tile} split {split}: {fast}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
