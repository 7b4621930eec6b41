"""``sgl-det probe``: drive a running server through the axes, or compare two reports."""

from __future__ import annotations

import argparse
import sys

from sgl_det.verb_arguments import check_folder, check_url, write_json

SUMMARY = "drive a running server through the axes and say which hold"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="the running server, for example http://127.0.0.1:30000")
    parser.add_argument("--json", metavar="FILE", help="write the report to FILE as well")
    parser.add_argument("--api-key", metavar="KEY", help="the server's API key")
    parser.add_argument("--axes", metavar="A,B", help="only these axes, separated by commas")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and prompts")
    parser.add_argument(
        "--seconds", type=float, metavar="N", help="leave out what is left after so long"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the prompts")
    parser.add_argument(
        "--compare",
        nargs=2,
        metavar=("A.json", "B.json"),
        help="compare two reports of equal numerics key instead of probing",
    )


def run(args: argparse.Namespace) -> int:
    """0: every claimed axis is bitwise; 1: one is not; 2: the probe could not be run."""
    from sgl_det.probe.client import ProbeError

    try:
        if bool(args.compare) == bool(args.url):
            raise ProbeError("give either --url, to probe a server, or --compare with two reports")
        return _compare(args) if args.compare else _probe(args)
    except (ProbeError, ValueError) as e:
        print(f"sgl-det probe: {e}", file=sys.stderr)
        return 2


def _probe(args: argparse.Namespace) -> int:
    from sgl_det.probe.runner import run_probe

    check_url(args.url)
    check_folder("--json", args.json)
    axes = [a.strip() for a in args.axes.split(",")] if args.axes is not None else None
    report = run_probe(
        args.url,
        api_key=args.api_key,
        axes=axes,
        quick=args.quick,
        seed=args.seed,
        limit_s=args.seconds,
    )
    print(report.table())
    write_json(args.json, report.to_json())
    return 0 if report.passed else 1


def _compare(args: argparse.Namespace) -> int:
    from sgl_det.probe.restart import compare_reports, load

    a, b = (load(path) for path in args.compare)
    row = compare_reports(a, b)
    print(
        f"restart: {row.verdict}, {row.requests} requests, {row.mismatches} mismatches, "
        f"key {a['key']}"
    )
    if row.first:
        print(f"first divergence: {row.first}")
    write_json(args.json, {"key": a["key"], "rows": [row.to_json()]})
    return 1 if row.failed else 0
