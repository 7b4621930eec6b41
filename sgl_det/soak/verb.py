"""``sgl-det soak``: hours of mixed load against a running server, or the replay of a mismatch."""

from __future__ import annotations

import argparse
import asyncio
import sys

from sgl_det.verb_arguments import check_folder, check_url, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", required=True, help="the running server, http://127.0.0.1:30000")
    parser.add_argument("--minutes", type=float, default=10, metavar="N", help="of load")
    parser.add_argument("--json", metavar="FILE", help="write the result to FILE")
    parser.add_argument(
        "--record",
        metavar="FILE",
        default="soak-mismatch.json",
        help="where the first mismatch is written (soak-mismatch.json)",
    )
    parser.add_argument("--replay", metavar="FILE", help="send a recorded mismatch again")
    parser.add_argument(
        "--times", type=int, default=10, metavar="N", help="attempts of a replay, at most"
    )
    parser.add_argument("--kinds", metavar="A,B", help="only these kinds, claimed or not")
    parser.add_argument("--oracle", type=int, metavar="N", help="how many requests have an oracle")
    parser.add_argument("--oracle-file", metavar="FILE", help="read the oracle, or write it")
    parser.add_argument(
        "--keep-going", action="store_true", help="do not end at the first mismatch"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of requests and load")
    parser.add_argument("--api-key", metavar="KEY", help="the server's API key")


def run(args: argparse.Namespace) -> int:
    """0: no mismatch; 1: a mismatch, or the server failed; 2: the soak could not be run."""
    from sgl_det.probe.client import ProbeError
    from sgl_det.soak.wire import ServerFailed

    try:
        _check(args)
        return _replay(args) if args.replay else _soak(args)
    except ServerFailed as e:
        print(f"sgl-det soak: the server failed: {e}", file=sys.stderr)
        return 1
    except (ProbeError, ValueError) as e:
        print(f"sgl-det soak: {e}", file=sys.stderr)
        return 2


def _check(args: argparse.Namespace) -> None:
    check_url(args.url)
    for flag in ("json", "record", "oracle_file"):
        check_folder(f"--{flag.replace('_', '-')}", getattr(args, flag))
    for flag in ("minutes", "times", "oracle"):
        value = getattr(args, flag)
        if value is not None and not value > 0:
            raise ValueError(f"--{flag} is {value}; give a number above 0")


def _soak(args: argparse.Namespace) -> int:
    from sgl_det.soak.runner import run_soak

    result = run_soak(
        args.url,
        minutes=args.minutes,
        seed=args.seed,
        api_key=args.api_key,
        kinds=None if args.kinds is None else [k.strip() for k in args.kinds.split(",")],
        requests=args.oracle,
        oracle_file=args.oracle_file,
        record_file=args.record,
        keep_going=args.keep_going,
    )
    print(result.text())
    if result.first:
        print(f"to see it again: sgl-det soak --url {args.url} --replay {args.record}")
    write_json(args.json, result.to_json())
    return 0 if result.passed else 1


def _replay(args: argparse.Namespace) -> int:
    from sgl_det.soak.replay import load, replay

    record = load(args.replay)
    found = asyncio.run(
        replay(
            args.url,
            record,
            times=args.times,
            keep_going=args.keep_going,
            api_key=args.api_key,
        )
    )
    print(found.text())
    write_json(args.json, found.to_json())
    return 1 if found.reproduced else 0
