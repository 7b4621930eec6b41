"""One line of JSON on stderr for each event that an operator's tools should see.

    {"sgl_det": "ready", "time": "2026-01-31T12:00:00.000+00:00", "key": "0123456789ab", ...}

A terminal gets none of them: the sentences beside them are for people.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from typing import Any, TextIO


def tell(event: str, *, stream: TextIO | None = None, **fields: Any) -> None:
    """Write one event. A log that takes nothing (a full disk, a closed pipe) stops no server."""
    out = sys.stderr if stream is None else stream
    if out is None or out.closed or out.isatty():
        return
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    line = json.dumps({"sgl_det": event, "time": time, **fields}, default=str)
    try:
        # In one call, so that lines of several processes do not mix.
        out.write(f"{line}\n")
        out.flush()
    except OSError:
        pass
