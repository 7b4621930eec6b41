"""Constants that several test modules share."""

from __future__ import annotations

from pathlib import Path

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
CPU = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def arguments(model: Path | str) -> tuple[str, ...]:
    """The SGLang flags of a CPU server in the tests."""
    return ("--model-path", str(model), *COMMON)
