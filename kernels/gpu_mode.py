"""The mode of a process that serves on a GPU: proven plans for its linear layers, and overrides.

`enable` proves, installs and reports; `disable` leaves nothing behind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch
from tqdm import tqdm

from sgl_det.kernels import canary, linear, proof
from sgl_det.kernels.aten_cuda import Overrides
from sgl_det.kernels.linear_candidates import Shape
from sgl_det.kernels.linear_setup import set_up
from sgl_det.kernels.proof_cache import ProofCache, machine

MOST_ROWS = 8192
_log = logging.getLogger("sgl_det")
_overrides: Overrides | None = None


def enable(shapes: Iterable[Shape], rows_of: dict[str, Callable[[], str]]) -> None:
    """Serve these linear layers, and every other product, in the canonical order.

    rows_of   named checks of other row operations: each says which kernel serves, or raises
    Raises `linear_setup.Unproven` where no kernel has the canonical bits.
    """
    disable()
    with proof.timed():
        _prove(shapes, rows_of)


def _prove(shapes: Iterable[Shape], rows_of: dict[str, Callable[[], str]]) -> None:
    global _overrides
    settings, shapes = proof.SETTINGS, sorted(set(shapes), key=lambda s: (s.n, s.k, s.bias))
    cache = ProofCache(settings.cache, machine()) if settings.cache else None
    with tqdm(total=len(shapes) + len(rows_of), desc="sgl_det: proving kernels", unit="") as bar:
        layers = set_up(
            shapes,
            cache=cache,
            most_rows=MOST_ROWS,
            only=settings.linear,
            progress=lambda name: (bar.update(), bar.set_postfix_str(name)),
        )
        _warn_of_rejected(layers)
        proof.PROVEN["linear"] = {_name(s): layer.report for s, layer in layers.items()}
        proof.PROVEN["rows"] = {}
        for name, check in rows_of.items():
            bar.update()
            bar.set_postfix_str(name)
            proof.PROVEN["rows"][name] = check()
    linear.install({s: layer.plan for s, layer in layers.items()})
    canary.start(layers)
    _overrides = Overrides()
    torch.cuda.empty_cache()


def disable() -> None:
    """Give PyTorch its kernels back and forget the plans."""
    global _overrides
    if _overrides is not None:
        _overrides.undo()
        _overrides = None
    linear.install({})
    canary.stop()
    for name in ("linear", "rows", "seconds"):
        proof.PROVEN.pop(name, None)


def _warn_of_rejected(layers) -> None:
    for shape, layer in layers.items():
        for candidate, reason in layer.report["rejected"].items():
            _log.warning("sgl_det: %s is not proven for %s: %s", candidate, _name(shape), reason)


def _name(shape: Shape) -> str:
    dtype = str(shape.dtype).removeprefix("torch.")
    return f"{shape.n}x{shape.k} {dtype}{' bias' if shape.bias else ''}"
