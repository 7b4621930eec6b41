"""Flags, and servers not yet started, that several test modules share."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from sgl_det.make_model import resolve_model
from sgl_det.server_process import ServerProcess

API_KEY = "test-key"
COMMON = (
    "--device",
    "cpu",
    "--attention-backend",
    "torch_native",
    "--chunked-prefill-size",
    "256",
    "--max-total-tokens",
    "32768",
    "--max-running-requests",
    "64",
    "--skip-server-warmup",
    "--sleep-on-idle",
    # In bf16 the linear layers of stock SGLang are batch-invariant on some CPUs: no control there.
    "--dtype",
    "float32",
)
GPU_BACKENDS = ("fa3", "triton", "flashinfer")
CPU = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def injected(folder: Path) -> dict[str, str]:
    """The environment of a server that runs `folder`'s `sitecustomize.py` in each process."""
    return python_path(folder, Path(__file__).parent / "injected")


def python_path(*folders: Path) -> dict[str, str]:
    """The environment in which these folders come first on Python's path."""
    parts = [*map(str, folders), os.environ.get("PYTHONPATH")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, parts))}


def arguments(model: Path | str) -> tuple[str, ...]:
    """The SGLang flags of a CPU server in the tests."""
    return ("--model-path", str(model), *COMMON)


def gpu_servers(
    flags: Sequence[str],
    logs: Path,
    env: Mapping[str, str],
    prefix: str = "",
    *,
    module: str = "sgl_det.launch_server",
    backends: Sequence[str] = GPU_BACKENDS,
) -> dict[str, ServerProcess]:
    """A server on each backend, by name, not started; its log is `logs`/`prefix``backend`.log.

    Ours, or that of another ``module``. The model is the Qwen3-0.6B shape, or the one that
    SGL_DET_TEST_MODEL names.
    """
    model = resolve_model(os.environ.get("SGL_DET_TEST_MODEL", "qwen3-0.6b"))
    return {
        name: ServerProcess(
            module,
            ("--model-path", model, "--attention-backend", name, *flags),
            log=logs / f"{prefix}{name}.log",
            env=env,
        )
        for name in backends
    }
