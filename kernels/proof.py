"""Where the start-up self-tests leave what they proved, and what they were asked to do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROVEN: dict[str, Any] = {}


@dataclass(slots=True)
class Settings:
    """Of one worker process, set before it loads a model.

    linear     serve linear layers by kernels whose name begins so, where they are proven
    cache      folder of what was proven before, or None to prove everything again
    canary_s   seconds between two cases that an idle server repeats, or 0 for none
    """

    linear: str = ""
    cache: Path | None = None
    canary_s: float = 180.0


SETTINGS = Settings()


@contextmanager
def timed() -> Iterator[None]:
    """Add what is done inside to the seconds that the self-tests took."""
    begun = time.monotonic()
    try:
        yield
    finally:
        PROVEN["seconds"] = round(PROVEN.get("seconds", 0.0) + time.monotonic() - begun, 2)


# One sentence for each proof that stopped holding in the running process: no claim survives it.
BROKEN: list[str] = []
