"""Named made-up models in the user's cache folder, made when they are first asked for."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

from sgl_det.config import cache_folder
from sgl_det.make_model import shapes
from sgl_det.make_model.weights import GENERATOR
from sgl_det.make_model.writer import RECORD, config_hash

SEED = 0


def resolve_model(path_or_name: str | os.PathLike) -> str:
    """The folder of a named shape, made once in the cache; anything else is returned unchanged.

    A folder of that name in the working directory wins over the named shape. Raises OSError if
    the cache folder cannot be written.
    """
    name = os.fspath(path_or_name)
    if name not in shapes.SHAPES or Path(name).exists():
        return name
    out = cache_path(name)
    if not (out / RECORD).is_file():
        _make_once(name, out)
    return str(out)


def cache_path(name: str) -> Path:
    """Where the named shape lies in the cache: another config or generator is another folder."""
    _, config = shapes.load_config(name)
    content = f"{GENERATOR} {config_hash(config)}"
    digest = hashlib.sha256(content.encode()).hexdigest()[:8]
    return cache_folder() / "models" / f"{name}-{SEED}-{digest}"


def _make_once(name: str, out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = out.with_name(f"{out.name}.lock").open("w")
    except OSError as e:
        raise OSError(
            f"the cache folder {out.parent} cannot be written ({e.strerror}); "
            "set XDG_CACHE_HOME to a folder that can"
        ) from e
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (out / RECORD).is_file():
            return
        # A process of its own: on a GPU it gives back all the memory that it took there, which the
        # server about to start would otherwise miss.
        command = (sys.executable, "-m", "sgl_det.cli", "make-model", name, str(out))
        done = subprocess.run((*command, "--seed", str(SEED)), stdout=subprocess.DEVNULL)
    if done.returncode:
        raise OSError(f"making the model {name!r} in {out} failed; the reason is printed above")
