"""One case of the proof, repeated every few minutes while the server is idle.

A kernel that gave the canonical bits at start-up and gives others now (a library that chose anew, a
processor that computes wrongly) ends every claim of the process: `proof.BROKEN`.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from sgl_det.kernels import linear_proof, proof

# Rows of a case, so that the operands of a wide layer fit beside a full KV pool.
MOST_ROWS, MOST_BYTES = 64, 1 << 28
_log = logging.getLogger("sgl_det")
_cases: Iterator[Case] | None = None
_next = 0.0


class Case(NamedTuple):
    """A proof that can be repeated.

    kernel, what   of which kernel, and what it was proven for
    differs        what differs from the bits of the start, or ""; RuntimeError: it could not run
    """

    kernel: str
    what: str
    differs: Callable[[], str]


def start(layers: Mapping) -> None:
    """Watch these layers: a mapping from Shape to `linear_setup.Layer`."""
    small = [(s, layer) for s, layer in layers.items() if _bytes(s) <= MOST_BYTES]
    watch(
        [
            Case(
                kernel.name,
                f"the linear layer {shape.n}x{shape.k}",
                partial(_linear, shape, kernel, edge),
            )
            for shape, layer in small
            for edge, kernel in zip(layer.plan.edges, layer.plan.chosen, strict=True)
            if edge <= MOST_ROWS
        ]
    )


def watch(cases: Sequence[Case]) -> None:
    """Repeat these cases in turn, one every `proof.SETTINGS.canary_s` seconds, or none if 0."""
    global _cases, _next
    every = proof.SETTINGS.canary_s
    cases = cases if every > 0 else ()
    _cases, _next = itertools.cycle(cases) if cases else None, time.monotonic() + every
    proof.PROVEN["canary"] = {"cases": 0, "mismatches": 0, "watched": len(cases)}


def stop() -> None:
    """Watch nothing."""
    global _cases
    _cases = None
    proof.PROVEN.pop("canary", None)


def tick() -> bool:
    """Repeat the next case, if it is time, and say whether one ran. Cheap otherwise."""
    global _next
    if _cases is None or time.monotonic() < _next:
        return False
    _next = time.monotonic() + proof.SETTINGS.canary_s
    case = next(_cases)
    try:
        found = case.differs()
    except RuntimeError as error:  # no memory beside a full pool proves nothing either way
        _log.warning("sgl_det: the canary did not run: %s", str(error).splitlines()[0])
        return False
    counts = proof.PROVEN["canary"]
    counts["cases"] += 1
    if found:
        counts["mismatches"] += 1
        sentence = (
            f"{case.kernel} was proven for {case.what} at start-up and no longer gives the "
            f"canonical bits ({found}); restart the server and check the processor"
        )
        proof.BROKEN.append(sentence)
        _log.critical("sgl_det: %s", sentence)
    return True


def _linear(shape, kernel, rows: int) -> str:
    return linear_proof.one_case(shape, kernel, rows)


def _bytes(shape) -> int:
    return shape.n * shape.k * shape.dtype.itemsize
