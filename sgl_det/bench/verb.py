"""``sgl-det bench``: stock SGLang, its deterministic mode and sgl_det under the same load."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from sgl_det.bench.workloads import SUITES, WORKLOADS, Workload

QUICK_S = 540.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--backend", metavar="NAME", help="flashinfer, fa3, triton or torch_native")
    add("--model", metavar="PATH", help="a folder, or a named made-up model (default: qwen3-8b)")
    add("--suite", choices=list(SUITES), default="quick")
    add("--workloads", metavar="A,B", help="these instead of a suite: " + ", ".join(WORKLOADS))
    add("--arms", metavar="A,B", help="of normal, deterministic, sgl_det (default: all)")
    add("--rounds", type=int, metavar="N", help="instead of each workload's own number")
    add("--seconds", type=float, metavar="N", help="limit, starts included (quick: 540)")
    add("--pool", type=int, metavar="TOKENS", help="KV tokens of each server (default: 160000)")
    add("--scale", type=int, metavar="N", help="divide all sizes, for a CPU (default there: 32)")
    add("--capacity", action="store_true", help="then each arm alone, without a bound")
    add("--again", action="store_true", help="full: also what was measured under the same key")
    add("--server-args", metavar="ARGS", default="", help="for all arms: --server-args='...'")
    add("--our-args", metavar="ARGS", default="", help="for sgl_det alone: --our-args='...'")
    add("--verdict-seconds", type=float, metavar="N", default=30.0, help="for the probes")
    add("--out", metavar="FOLDER", type=Path, default=Path("sgl-det-bench"))
    add("--plan", action="store_true", help="print the steps and their times, start nothing")
    add("--merge", metavar="FILE", nargs="+", type=Path, help="add other e2e.json to FOLDER's")
    add("--report", action="store_true", help="write FOLDER/report.html from its JSON files")


def run(args: argparse.Namespace, known: Mapping[str, Workload] = WORKLOADS) -> int:
    """0: measured, sgl_det bitwise; 1: its verdict is another; 2: it could not be run.

    known: the workloads that may be named, a suite's and others.
    """
    try:
        if args.merge:
            return _merge(args)
        if args.report and not args.backend:
            return _report(args.out)
        return _bench(args, known)
    except (RuntimeError, ValueError, OSError) as error:
        print(f"sgl-det bench: {error}", file=sys.stderr)
        return 2


def _bench(args: argparse.Namespace, known: Mapping[str, Workload]) -> int:
    session = _session(args, known)
    groups = session.groups()
    _say(f"{args.backend}, {session.settings.model}, {', '.join(session.arms)}: the plan")
    plan = _described(session, groups) if session.workloads else ["nothing but the capacity"]
    _say("\n".join(plan))
    if args.plan:
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `timeout`: stop the servers
    good = session.run() if session.workloads else True
    if args.capacity:
        session.capacity()
    from sgl_det.bench.table import servers_table

    _say("\n" + servers_table(args.out, backend=args.backend))
    if args.report:
        _report(args.out)
    return 0 if good else 1


def _described(session, groups) -> list[str]:
    from sgl_det.bench.schedule import described

    return described([session.steps(g) for g in groups], session.seconds)


def _session(args: argparse.Namespace, known: Mapping[str, Workload]):
    from dataclasses import replace

    from sgl_det.backend import BACKENDS
    from sgl_det.bench import arms, workloads
    from sgl_det.bench.session import Session

    if args.backend not in BACKENDS:
        raise ValueError(f"--backend is {args.backend!r}; there are {', '.join(BACKENDS)}")
    on_cpu = args.backend == arms.CPU_BACKEND
    scale = args.scale or (workloads.CPU_SCALE if on_cpu else 1)
    names = SUITES[args.suite]
    names = (*names, *(n for n in known if n not in WORKLOADS)) if args.suite == "full" else names
    if args.workloads is not None:
        names = [n for n in args.workloads.split(",") if n]
    found = {n: w.scaled(scale) for n, w in workloads.chosen(names, known).items()}
    if args.rounds:
        found = {n: replace(w, rounds=args.rounds) for n, w in found.items()}
    seconds = args.seconds
    if seconds is None and args.suite == "quick" and args.workloads is None:
        seconds = QUICK_S
    return Session(
        settings=arms.Settings(
            backend=args.backend,
            model=args.model or ("demo" if on_cpu else "qwen3-8b"),
            pool=args.pool or arms.POOL_TOKENS // scale,
            logs=args.out,
            extra=tuple(shlex.split(args.server_args)),
            ours=tuple(shlex.split(args.our_args)),
        ),
        workloads=found,
        arms=_arms(args),
        out=args.out,
        seconds=seconds,
        scale=scale,
        verdict_s=args.verdict_seconds,
        again=args.again or args.suite == "quick" or args.workloads is not None,
        say=_say,
    )


def _arms(args: argparse.Namespace) -> tuple[str, ...]:
    from sgl_det.bench import arms

    possible = arms.arms_of(args.backend)
    wanted = tuple(args.arms.split(",")) if args.arms else tuple(arms.ARMS)
    if unknown := [a for a in wanted if a not in arms.ARMS]:
        raise ValueError(f"no arm is named {unknown[0]!r}; there are {', '.join(arms.ARMS)}")
    for arm in wanted:
        if arm not in possible:
            _say(f"no {arm} arm: {arms.NO_DETERMINISTIC}")
    return tuple(a for a in wanted if a in possible)


def _merge(args: argparse.Namespace) -> int:
    from sgl_det.bench import results

    document = results.load(args.out)
    for path in args.merge:
        document = results.merged(document, json.loads(path.read_text(encoding="utf-8")))
    results.write(args.out, document)
    _say(f"{args.out / results.NAME}: {len(document['rows'])} rows")
    return 0


def _report(folder: Path) -> int:
    from sgl_det.bench.report import build

    _say(f"wrote {build(folder)}")
    return 0


def _say(text: str) -> None:
    print(text, flush=True)
