"""Where the start-up self-tests leave what they proved, for the report."""

from __future__ import annotations

from typing import Any

PROVEN: dict[str, Any] = {}
