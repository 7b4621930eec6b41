"""What the verbs that talk to a running server ask of their arguments, and how they write JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def check_url(url: str) -> None:
    """Raises ValueError where it names no protocol."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"--url is {url!r}; give one that starts with http:// or https://")


def check_folder(flag: str, path: str | None) -> None:
    """Raises ValueError where the file of this flag could not be written, before hours of work."""
    if path and not Path(path).resolve().parent.is_dir():
        raise ValueError(f"{flag} {path}: its folder does not exist")


def write_json(path: str | None, content: dict[str, Any]) -> None:
    """Write the file that was asked for, if one was."""
    if path:
        Path(path).write_text(json.dumps(content, indent=1) + "\n")
