"""Compiled code in the cache folder: each file ends with the SHA-256 of what stands before it.

A file that was cut short or changed on disk is not whole, and is compiled anew. The dynamic loader
does not look at what follows the sections of a library, so the seal may stay on.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path

_SEAL = hashlib.sha256().digest_size
_log = logging.getLogger("sgl_det")


def read(path: Path) -> bytes | None:
    """The content, or None where there is no file, or one that is not whole: that is logged."""
    try:
        data = path.read_bytes()
    except OSError:  # `write` tells what is wrong with the folder
        return None
    content, seal = data[:-_SEAL], data[-_SEAL:]
    if hashlib.sha256(content).digest() == seal:
        return content
    _log.warning("sgl_det: %s is not what was written there; it is compiled anew", path)
    return None


def write(path: Path, content: bytes) -> None:
    """Put a whole file in place, also beside processes that do the same.

    Raises RuntimeError, in one sentence, where the folder cannot be written.
    """
    name = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(suffix=".part", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content + hashlib.sha256(content).digest())
        os.replace(name, path)
    except OSError as error:
        if name is not None:
            Path(name).unlink(missing_ok=True)
        raise RuntimeError(
            f"the cache folder {path.parent} cannot be written ({error.strerror}), and compiled "
            f"kernels are kept there; make room in it, or set XDG_CACHE_HOME to another folder"
        ) from error
