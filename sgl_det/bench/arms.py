"""The servers of a comparison: three arms with equal, bounded KV pools, of which one is awake."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import requests

from sgl_det import numerics
from sgl_det.make_model import resolve_model, shapes
from sgl_det.probe.client import Server
from sgl_det.server_process import ServerProcess

NORMAL, DETERMINISTIC, OURS = "normal", "deterministic", "sgl_det"
ARMS: dict[str, tuple[str, tuple[str, ...]]] = {
    NORMAL: ("sgl_det.stock", ()),
    DETERMINISTIC: ("sgl_det.stock", ("--enable-deterministic-inference",)),
    OURS: ("sgl_det.launch_server", ()),
}
CPU_BACKEND = "torch_native"
NO_DETERMINISTIC = "SGLang's deterministic mode does not run on torch_native"
POOL_TOKENS = 160_000  # three servers of the Qwen3-8B shape fit on one H200
_CPU = ("--device", "cpu", "--sleep-on-idle")
_BATCH = ("--max-running-requests", "128", "--cuda-graph-max-bs-decode", "128")
_SHARED = ("--mem-fraction-static", "0.9")
_MIB = 2**20
# Of a server beside its weights and its pool: CUDA context, graphs, workspaces, activations, bytes.
_BESIDE = 5 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What all arms of a comparison share.

    pool    KV tokens of each server; None: as many as SGLang finds room for
    extra   more SGLang arguments for all arms; ours: for sgl_det alone
    logs    the folder of the servers' logs
    """

    backend: str
    model: str
    pool: int | None
    logs: Path
    extra: tuple[str, ...] = ()
    ours: tuple[str, ...] = ()

    def server(self, arm: str, what: str = "server") -> ServerProcess:
        """One arm, not started."""
        module, flags = ARMS[arm]
        argv = ("--model-path", resolve_model(self.model), "--attention-backend", self.backend)
        argv += _CPU if self.backend == CPU_BACKEND else ()
        if self.pool is not None:
            argv += ("--max-total-tokens", str(self.pool), *_SHARED)
        argv += (*_BATCH, "--skip-server-warmup", *self.extra, *flags)
        argv += self.ours if arm == OURS else ()
        return ServerProcess(module, argv, log=self.logs / f"{self.backend}.{what}.{arm}.log")


def arms_of(backend: str) -> tuple[str, ...]:
    """The arms that a backend has."""
    return tuple(a for a in ARMS if a != DETERMINISTIC or backend != CPU_BACKEND)


def groups(arms: Sequence[str], settings: Settings) -> list[tuple[str, ...]]:
    """Which arms run side by side: all, or the deterministic one alone after the others.

    By the memory of the GPU, where both it and the model's size are known.
    """
    pair = tuple(a for a in arms if a != DETERMINISTIC)
    if DETERMINISTIC not in arms or not pair or fits(len(arms), settings):
        return [tuple(arms)]
    return [pair, (DETERMINISTIC,)]


def fits(servers: int, settings: Settings) -> bool:
    """Whether so many servers have room on one GPU; False where that cannot be told."""
    memory = gpu_memory()
    need = server_bytes(settings.model, settings.pool) if memory else None
    return need is not None and servers * need <= memory


def gpu_memory() -> int | None:
    """Bytes of the first GPU; None without one."""
    mib = _nvidia_smi("memory.total")
    return int(mib) * _MIB if mib else None


def _nvidia_smi(field: str) -> str | None:
    query = ("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits")
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = found.stdout.splitlines()
    return lines[0].strip() if found.returncode == 0 and lines else None


def server_bytes(model: str, pool: int | None) -> int | None:
    """About what a bf16 server takes of a GPU; None where that is not known.

    model: a folder, or the name of a made-up model, which is not made for this.
    """
    if pool is None or not (model in shapes.SHAPES or Path(model, "config.json").is_file()):
        return None
    if Path(model).is_dir():
        config = json.loads(Path(model, "config.json").read_text())
        weights = sum(p.stat().st_size for p in Path(model).glob("*.safetensors"))
    else:
        _, config = shapes.load_config(model)
        weights = 2 * sum(p.numel for p in shapes.parameters(config))
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return weights + 4 * config["num_hidden_layers"] * heads * size * pool + _BESIDE


@contextmanager
def beside(
    servers: Mapping[str, ServerProcess], timeout: float = 400.0
) -> Iterator[tuple[dict[str, float], dict[str, str]]]:
    """Servers that come up side by side: (seconds of each to its first answer, what failed).

    A deterministic arm that does not start is left out, and what it said is told; any other one
    that does not start raises RuntimeError with the end of its log.
    """
    begun = time.monotonic()

    def ready(server: ServerProcess) -> float | RuntimeError:
        try:
            server.wait_ready(timeout)
        except RuntimeError as error:
            return error
        return round(time.monotonic() - begun, 1)

    with ExitStack() as stack:
        for server in servers.values():
            stack.callback(server.stop)
            server.start()
        with ThreadPoolExecutor(len(servers)) as pool:
            found = dict(zip(servers, pool.map(ready, servers.values()), strict=True))
        failed = {a: e for a, e in found.items() if isinstance(e, RuntimeError)}
        for arm, error in failed.items():
            if arm != DETERMINISTIC or len(servers) == 1:
                raise error
        said = {arm: str(e).strip().splitlines()[-1] for arm, e in failed.items()}
        yield {a: s for a, s in found.items() if a not in failed}, said


def check_pools(servers: Mapping[str, dict[str, Any]]) -> None:
    """Raise RuntimeError unless all arms have room for as many KV tokens."""
    sizes = {arm: about["max_total_num_tokens"] for arm, about in servers.items()}
    if len(set(sizes.values())) > 1:
        told = ", ".join(f"{arm} {n}" for arm, n in sizes.items())
        raise RuntimeError(
            f"the KV pools differ ({told}); give a --pool that every arm has room for"
        )


@contextmanager
def alone(servers: Mapping[str, ServerProcess], arm: str) -> Iterator[None]:
    """Only this arm's processes run: an idle scheduler polls, and ours repeats its proof."""
    family = []
    for other, server in servers.items():
        if other != arm and server.alive():
            root = psutil.Process(server.pid)
            family += [root, *root.children(recursive=True)]
    try:
        for process in family:
            process.send_signal(signal.SIGSTOP)
        yield
    finally:
        for process in family:
            if process.is_running():
                process.send_signal(signal.SIGCONT)


def about_server(server: ServerProcess, model: str) -> dict[str, Any]:
    """Command line and settings of a running server; the model's folder goes by its name."""
    info = requests.get(f"{server.url}/server_info", timeout=60).json()
    command = " ".join(server.command[1:]).replace(resolve_model(model), model)
    found = {"command": re.sub(r" --port \d+$", "", command)}
    names = ("version", "max_total_num_tokens", "chunked_prefill_size", "disable_radix_cache")
    return found | {name: info.get(name) for name in names}


def machine() -> str:
    """What the results are of: the GPU by nvidia-smi, or the CPU with its instruction set."""
    if name := _nvidia_smi("name"):
        return name
    import torch

    return f"{numerics.cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"


def vocabulary(url: str) -> int:
    """The size of a running server's vocabulary, as the probe finds it out."""

    async def ask() -> int:
        async with Server(url) as server:
            return (await server.discover()).vocab_size

    return asyncio.run(ask())


def host_memory_gb(server: ServerProcess) -> float:
    """Resident host memory of a server and its children, in GiB; shared pages count each time."""
    root = psutil.Process(server.pid)
    rss = sum(p.memory_info().rss for p in (root, *root.children(recursive=True)))
    return round(rss / 2**30, 2)


def memory_gb(server: ServerProcess) -> dict[str, float]:
    """The memory of a server that is alone on its GPU, in GiB, by parts, and what is left there.

    SGLang measures its parts by what is free before and after: beside others they are wrong.
    """
    info = requests.get(f"{server.url}/server_info", timeout=60).json()
    used = info["internal_states"][0].get("memory_usage") or {}
    graphs = sum((used.get("graph") or {}).values()) if "graph" in used else None
    parts = {"weights": used.get("weight"), "kv": used.get("kvcache"), "graphs": graphs}
    left = re.findall(r"available_\w+_mem=([\d.]+)", server.log.read_text(errors="replace"))
    parts["available"] = float(left[-1]) if left else None
    parts["host"] = host_memory_gb(server)
    return {f"{name}_gb": round(gb, 3) for name, gb in parts.items() if gb is not None}
