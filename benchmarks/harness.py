"""What the benchmarks of the backends share: ``sgl-det bench`` with cases of their own beside."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from sgl_det.bench import verb
from sgl_det.bench.workloads import WORKLOADS, Workload


def main(
    backend: str,
    cases: Mapping[str, Workload] | None = None,
    argv: Sequence[str] | None = None,
    **defaults,
) -> int:
    """Measure a backend; returns the exit status of ``sgl-det bench``.

    cases are known by name beside those of the suites, and belong to the full one. defaults are
    of flags, under the names that argparse gives them.
    """
    known = {**WORKLOADS, **(cases or {})}
    parser = argparse.ArgumentParser(description=f"sgl-det bench --backend {backend}")
    verb.add_arguments(parser)
    parser.set_defaults(backend=backend, **defaults)
    return verb.run(parser.parse_args(argv), known)
