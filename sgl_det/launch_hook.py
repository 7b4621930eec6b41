"""What the launcher's process does when its first worker reports, and when it is to end."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

# SGLang looks for it every five seconds while it waits for running requests.
_OVER = {"SGL_FORCE_SHUTDOWN": "1"}
_ready: Callable[[dict[str, Any]], None] | None = None
_end: Callable[[bool], None] | None = None
_drain_s = 0.0
_asked = False


def on_ready(callback: Callable[[dict[str, Any]], None]) -> None:
    """Call ``callback`` with the worker's report; what it raises stops the server."""
    global _ready
    _ready = callback


def on_end(callback: Callable[[bool], None]) -> None:
    """Call ``callback`` before the process ends by itself: True if it was asked to end."""
    global _end
    _end = callback


def drain_for(seconds: float) -> None:
    """How long running requests may go on after SIGTERM."""
    global _drain_s
    _drain_s = seconds


def ready(report: dict[str, Any]) -> None:
    if _ready is not None:
        _ready(report)


def asked() -> bool:
    """Whether SIGTERM came."""
    return _asked


def terminate() -> None:
    """SIGTERM came: running requests get some seconds, and none at all when it comes again."""
    global _asked
    again, _asked = _asked, True
    over = threading.Timer(0 if again else _drain_s, os.environ.update, [_OVER])
    over.daemon = True
    over.start()


def end() -> None:
    """End this process, whose children have ended: status 0 if it was asked to, else 1."""
    try:
        if _end is not None:
            _end(_asked)
    finally:
        os._exit(0 if _asked else 1)
