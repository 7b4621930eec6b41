"""Where the start-up self-tests leave what they proved, and what they were asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROVEN: dict[str, Any] = {}


@dataclass(slots=True)
class Settings:
    """Of one worker process, set before it loads a model.

    linear   serve linear layers by kernels whose name begins so, where they are proven
    cache    folder of what was proven before, or None to prove everything again
    """

    linear: str = ""
    cache: Path | None = None


SETTINGS = Settings()
# One sentence for each proof that stopped holding in the running process: no claim survives it.
BROKEN: list[str] = []
