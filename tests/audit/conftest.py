"""Fixtures of the audit's tests: events, traces, and the rules."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from audit_support import kernel, launch


@pytest.fixture
def events():
    """Events of names: the first launched by itself, all of them again by one graph."""

    def make(names: list[str]) -> list[dict]:
        found = [{"ph": "M", "name": "process_name", "args": {"name": "python"}}]
        found += [launch("cudaLaunchKernel", 1), launch("cudaGraphLaunch", 2)]
        found.append(kernel(names[0], 1, 2.5))
        return found + [kernel(name, 2) for name in names]

    return make


@pytest.fixture
def trace(tmp_path, events):
    """A compressed trace of names, in a folder of its own."""

    def write(names: list[str], folder: Path = tmp_path) -> Path:
        path = folder / "audit-TP-0.trace.json.gz"
        with gzip.open(path, "wt") as file:
            json.dump({"schemaVersion": 1, "traceEvents": events(names)}, file)
        return path

    return write


@pytest.fixture(scope="session")
def rules():
    from sgl_det.audit.rules import load

    return load()
