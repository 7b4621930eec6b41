"""The numerics key: everything inside which equal bits are promised, and nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgl_det.backend import Backend


def key(parts: dict[str, Any]) -> str:
    """Twelve hex digits over the parts."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def parts(
    runner: Any, backend: Backend, *, weights: str, patches: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """What the bits depend on, for SGLang's ``ModelRunner`` object."""
    import torch

    from sgl_det import __version__

    return {
        **_processor(runner.device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if runner.device == "cuda" else None,
        "triton": _version("triton"),
        "flashinfer": _version("flashinfer-python"),
        "sgl_kernel": _version("sglang-kernel"),
        "deep_gemm": _version("sgl-deep-gemm"),
        "cutlass_dsl": _version("nvidia-cutlass-dsl"),
        "sglang": _version("sglang"),
        "sgl_det": __version__,
        "backend": backend.name,
        "split_tokens": dict(backend.split_tokens),
        "model": _config_digest(runner.model_config.hf_config),
        "weights": weights,
        "dtype": str(runner.dtype).removeprefix("torch."),
        "kv_dtype": str(runner.kv_cache_dtype).removeprefix("torch."),
        "page_size": runner.page_size,
        "tp": runner.server_args.tp_size,
        "norm_kind": _norm_kind(runner.device),
        **_kernels(runner, backend.name),
        "patches": {p["name"]: p["fingerprint"] for p in patches},
    }


def recorded(scheduler: Any) -> dict[str, Any]:
    """What is written down beside the key but must not matter for the bits."""
    args = scheduler.server_args
    return {
        "cpu": cpu_name(),
        "driver": _driver(),
        "chunked_prefill_size": args.chunked_prefill_size,
        "max_running_requests": scheduler.max_running_requests,
        "max_total_num_tokens": scheduler.max_total_num_tokens,
        "disable_radix_cache": args.disable_radix_cache,
        "disable_cuda_graph": args.disable_cuda_graph,
        "model_path": args.model_path,
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _processor(device: str) -> dict[str, Any]:
    import torch

    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        return {"gpu": torch.cuda.get_device_name(), "arch": f"sm_{major}{minor}"}
    return {
        "gpu": None,
        "arch": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def _kernels(runner: Any, backend: str) -> dict[str, Any]:
    """The orders of our kernels, and which norms are not the fused ones."""
    from sgl_det.kernels import order, proof, sampler_proof

    orders = order.in_use(runner.device)
    if runner.device == "cuda":
        import torch

        from sgl_det.kernels import attention_orders

        major, minor = torch.cuda.get_device_capability()
        sizes = {"d": runner.model_config.head_dim, "dtype": runner.dtype}
        orders |= attention_orders.in_use(backend, **sizes, arch=10 * major + minor)
    rows = proof.PROVEN.get("rows", {})
    return {
        "orders": orders,
        "sampler": sampler_proof.sources("cuda" if runner.device == "cuda" else "cpu"),
        "norms": {name: kernel.partition(",")[0] for name, kernel in rows.items()},
    }


def _norm_kind(device: str) -> str:
    """FlashInfer's norm on a GPU is CUDA or CuTe DSL, as installed; our own C kernel on a CPU."""
    import os

    if device != "cuda":
        return "sgl_det-c"
    forced = os.environ.get("FLASHINFER_USE_CUDA_NORM", "0") == "1"
    return "cuda" if forced or _version("nvidia-cutlass-dsl") is None else "cute-dsl"


def _config_digest(hf_config: Any) -> str:
    fields = hf_config.to_dict()
    # SGLang writes --context-length into the configuration; no kernel sees it.
    for incidental in ("_name_or_path", "transformers_version", "context_len"):
        fields.pop(incidental, None)
    text = json.dumps(fields, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def cpu_name() -> str | None:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(x.partition(":")[2].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        return None


def _driver() -> str | None:
    try:
        with open("/proc/driver/nvidia/version") as lines:
            return lines.readline().strip()
    except OSError:
        return None
