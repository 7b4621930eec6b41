"""``sgl-det make-model``: write a checkpoint from a config and a seed."""

from __future__ import annotations

import argparse
import sys

from sgl_det.make_model import SHAPES, make_model

SUMMARY = "write a checkpoint from a config and a seed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        metavar="CONFIG_OR_NAME",
        help=f"a config.json, a folder with one, or one of: {', '.join(SHAPES)}",
    )
    parser.add_argument("out", metavar="OUT", help="the folder to write")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="0 or more (default 0)")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="where to compute; the bytes are the same (default: a GPU for 1 GiB or more)",
    )


def run(args: argparse.Namespace) -> int:
    """0: OUT holds the checkpoint; 2: it could not be written."""
    try:
        print(make_model(args.config, args.out, seed=args.seed, device=args.device))
    except (OSError, ValueError) as e:
        print(f"sgl-det make-model: {e}", file=sys.stderr)
        return 2
    return 0
