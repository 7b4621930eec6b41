"""Compiles the CPU kernels, once per source, compiler and processor, into the user's cache."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from sgl_det.kernels import sealed

_HERE = Path(__file__).parent
_FLAGS = (
    "-O2 -march=native -std=gnu11 -ffp-contract=off -fno-math-errno -fPIC -shared -fopenmp".split()
)


def build() -> Path:
    """The shared library, compiled now if it is not in the cache, or not whole there.

    Raises RuntimeError, in one sentence, when there is no C compiler, it refuses, or the cache
    cannot be written.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if not compiler:
        raise RuntimeError("the CPU kernels need a C compiler: no gcc in PATH; install gcc")
    target = cache_folder() / f"cpu-{_digest(compiler)}.so"
    if sealed.read(target) is None:
        sealed.write(target, _compile(compiler))
    return target


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/sgl_det``, or ``~/.cache/sgl_det``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sgl_det"


def instruction_set() -> str:
    """What the compiled code uses, for the report: ``avx512f``, ``avx2`` or ``generic``."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or "cc"
    macros = _run([compiler, "-march=native", "-dM", "-E", "-x", "c", os.devnull])
    for macro, name in (("__AVX512F__", "avx512f"), ("__AVX2__", "avx2")):
        if f"#define {macro} 1" in macros:
            return name
    return "generic"


def _sources() -> list[Path]:
    return sorted([*_HERE.glob("cpu_*.c"), *_HERE.glob("cpu_*.h")])


def _digest(compiler: str) -> str:
    """Sources, flags, and what the compiler makes of this processor."""
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for path in _sources():
        digest.update(path.read_bytes())
    digest.update(_run([compiler, "--version"]).encode())
    digest.update(_run([compiler, "-march=native", "-dM", "-E", "-x", "c", os.devnull]).encode())
    return digest.hexdigest()[:16]


def _compile(compiler: str) -> bytes:
    c_files = [str(p) for p in _sources() if p.suffix == ".c"]
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "cpu.so"
        _run([compiler, *_FLAGS, *c_files, "-lm", "-o", str(library)])
        return library.read_bytes()


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise RuntimeError(f"the CPU kernels need a C compiler: {error}") from error
    if done.returncode:
        first = next((x for x in done.stderr.splitlines() if "error" in x), done.stderr.strip())
        raise RuntimeError(
            f"the CPU kernels do not compile on this {platform.machine()}: {first.strip()}"
        )
    return done.stdout
