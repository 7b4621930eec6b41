"""One case of the proof, repeated every few minutes while the server is idle.

A kernel that gave the canonical bits at start-up and gives others now (a library that chose anew, a
GPU that computes wrongly) ends every claim of the process: `proof.BROKEN`.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator, Mapping

from sgl_det.kernels import linear_proof, proof

EVERY_S = 180.0
# Rows of a case, so that the operands of a wide layer fit beside a full KV pool.
MOST_ROWS, MOST_BYTES = 64, 1 << 28
_log = logging.getLogger("sgl_det")
_cases: Iterator | None = None
_next = 0.0


def start(layers: Mapping) -> None:
    """Watch these layers: a mapping from Shape to `linear_setup.Layer`."""
    global _cases, _next
    small = [(s, layer) for s, layer in layers.items() if _bytes(s) <= MOST_BYTES]
    cases = [
        (shape, kernel, edge)
        for shape, layer in small
        for edge, kernel in zip(layer.plan.edges, layer.plan.chosen, strict=True)
        if edge <= MOST_ROWS
    ]
    _cases, _next = itertools.cycle(cases) if cases else None, time.monotonic() + EVERY_S
    proof.PROVEN["canary"] = {"cases": 0, "mismatches": 0, "watched": len(cases)}


def stop() -> None:
    """Watch nothing."""
    global _cases
    _cases = None
    proof.PROVEN.pop("canary", None)


def tick() -> None:
    """Repeat the next case, if it is time. Cheap otherwise: an idle loop calls it."""
    global _next
    if _cases is None or time.monotonic() < _next:
        return
    _next = time.monotonic() + EVERY_S
    shape, kernel, rows = next(_cases)
    try:
        found = linear_proof.one_case(shape, kernel, rows)
    except RuntimeError as error:  # no memory beside a full pool proves nothing either way
        _log.warning("sgl_det: the canary did not run: %s", str(error).splitlines()[0])
        return
    counts = proof.PROVEN["canary"]
    counts["cases"] += 1
    if found:
        counts["mismatches"] += 1
        sentence = (
            f"{kernel.name} was proven for the linear layer {shape.n}x{shape.k} at start-up and no "
            f"longer gives the canonical bits ({found}); restart the server and check the GPU"
        )
        proof.BROKEN.append(sentence)
        _log.critical("sgl_det: %s", sentence)


def _bytes(shape) -> int:
    return shape.n * shape.k * shape.dtype.itemsize
