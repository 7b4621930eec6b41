"""The probe: drives a running SGLang server of any kind and compares its answers as bits.

``await probe(url)`` or ``run_probe(url)`` returns a Report: ``passed``, ``table()``, ``to_json()``.
"""

from __future__ import annotations

_HOME = {
    "Answer": "compare",
    "AxisResult": "table",
    "Divergence": "compare",
    "ProbeError": "client",
    "Report": "table",
    "compare_reports": "restart",
    "probe": "runner",
    "run_probe": "runner",
}
__all__ = list(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
