"""Hands the first worker's report to whoever started the server, before it is ready."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_callback: Callable[[dict[str, Any]], None] | None = None


def on_ready(callback: Callable[[dict[str, Any]], None]) -> None:
    """Call ``callback`` with the worker's report; what it raises stops the server."""
    global _callback
    _callback = callback


def ready(report: dict[str, Any]) -> None:
    if _callback is not None:
        _callback(report)
