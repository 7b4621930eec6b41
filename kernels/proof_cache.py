"""What was proven and timed, kept on disk: one JSON file for each (machine, sources, layer).

A file that is not exactly what this machine, these versions and these sources would have written is
ignored, and written anew.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton

# What decides a kernel's bits or which kernels there are; a change voids what was proven.
_SOURCES = (
    "cublas.py",
    "cublaslt.py",
    "graph_timing.py",
    "linear_candidates.py",
    "linear_data.py",
    "linear_proof.py",
    "linear_timing.py",
    "matmul.py",
    "matmul_tma.py",
)


@functools.cache
def machine() -> dict[str, Any]:
    """The GPU, versions and sources under which a proof holds."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "driver_cuda": torch.version.cuda,
        "cublas": _cublas_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "deep_gemm": version_of("sgl-deep-gemm"),
        "sources": _digest_of_sources(),
    }


class ProofCache:
    """Reads and writes the files of one folder, for the machine given."""

    def __init__(self, folder: Path, of: dict[str, Any]):
        self.folder, self._of = folder, of

    def _path(self, layer: dict[str, Any]) -> Path:
        return self.folder / f"linear-{_digest([self._of, layer])[:16]}.json"

    def read(self, layer: dict[str, Any]) -> dict[str, Any] | None:
        """What was written for the layer, or None where there is nothing, or nothing valid."""
        try:
            entry = json.loads(self._path(layer).read_text(encoding="utf-8"))
            body, digest = entry["body"], entry["digest"]
            of, result = (body["machine"], body["layer"]), body["result"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return result if digest == _digest(body) and of == (self._of, layer) else None

    def write(self, layer: dict[str, Any], result: dict[str, Any]) -> None:
        """Keep a result. A folder that cannot be written costs the next start its time only."""
        body = {"machine": self._of, "layer": layer, "result": result}
        text = json.dumps({"digest": _digest(body), "body": body}, indent=1)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder, suffix=".part")
        except OSError:
            return
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(name).replace(self._path(layer))
        except OSError:
            Path(name).unlink(missing_ok=True)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _digest_of_sources() -> str:
    here = Path(__file__).parent
    text = b"".join((here / name).read_bytes() for name in _SOURCES)
    return hashlib.sha256(text).hexdigest()[:16]


def version_of(distribution: str) -> str | None:
    """Its installed version, or None."""
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cublas_version() -> str | None:
    return version_of("nvidia-cublas") or version_of("nvidia-cublas-cu12")
