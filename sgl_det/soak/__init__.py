"""The soak: hours of mixed load against one server, each answer compared with its oracle as bits.

``await soak(url, minutes=...)`` or ``run_soak(url, ...)`` returns a Result: ``passed``, ``text()``,
``to_json()``. ``replay`` sends again what a mismatch was recorded with.
"""

from __future__ import annotations

_HOME = {"Result": "result", "replay": "replay", "run_soak": "runner", "soak": "runner"}
__all__ = list(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
