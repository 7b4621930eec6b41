"""``sgl-det VERB``: serve, check, probe, soak, bench, make-model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

# Verb -> (module, one line). Modules are imported when their verb is used: some need torch.
VERBS = {
    "check": ("sgl_det.check", "do the patches fit the installed SGLang, or wheels given by path"),
    "probe": ("sgl_det.probe.verb", "drive a running server through the axes and compare bits"),
    "soak": (
        "sgl_det.soak.verb",
        "mixed load for hours: every answer is compared with its bits alone",
    ),
    "bench": ("sgl_det.bench.verb", "stock SGLang and sgl_det under the same load, in turn"),
    "make-model": ("sgl_det.make_model.verb", "write a checkpoint from a config and a seed"),
}


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["serve"]:
        from sgl_det.launch_server import main as serve

        return serve(argv[1:])
    parser = argparse.ArgumentParser(prog="sgl-det", allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verbs.add_parser("serve", help="start the server (python -m sgl_det.launch_server)")
    chosen = None
    for verb, (module, text) in VERBS.items():
        sub = verbs.add_parser(verb, help=text, description=text, allow_abbrev=False)
        if argv[:1] == [verb]:
            chosen = import_module(module)
            chosen.add_arguments(sub)
    args = parser.parse_args(argv)
    return chosen.run(args)


if __name__ == "__main__":
    sys.exit(main())
