"""Deterministic SGLang: the same bits for the same request, whatever else the server does.

Importing this package changes nothing. The public names are loaded when they are first used.
"""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["Axis", "Engine", "Patch", "PatchError", "PatchSet", "__version__", "make_model"]

_HOME = {
    "Axis": "sgl_det.axis",
    "Engine": "sgl_det.engine",
    "Patch": "sgl_det.patch",
    "PatchError": "sgl_det.patch",
    "PatchSet": "sgl_det.patch",
    "make_model": "sgl_det.make_model",
}


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
