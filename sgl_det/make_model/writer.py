"""A checkpoint folder from a config and a seed: safetensors, tokenizer, configs.

The files are planned first (names, offsets, headers), then every tensor is written at its offset by
one of a few threads, so that memory stays at a chunk per thread and the disk bounds a 16 GB model.
The folder appears under its name only when it is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sgl_det.make_model import shapes, tokenizer, weights
from sgl_det.make_model.weights import GENERATOR, Parameter

RECORD = "sgl_det_model.json"
SHARD_BYTES = 4_000_000_000
_DTYPES = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}
# Below this a GPU's start-up costs more than it saves.
_SMALLEST_FOR_GPU = 1 << 30
_SPARE_BYTES = 64 << 20


def make_model(
    config_or_name: str | os.PathLike,
    out: str | os.PathLike,
    seed: int = 0,
    device: str | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a checkpoint to ``out`` and return it.

    config_or_name  a named shape (``sgl_det.make_model.SHAPES``), a config.json or its folder
    device          "cpu" or "cuda"; left out, a GPU for 1 GiB or more, where there is one
    shard_bytes     the most bytes of tensor data in one file, unless one tensor is larger

    Equal (config, seed) give equal bytes on every machine and device. If ``out`` is that checkpoint
    already, nothing is written. Raises ValueError for an unusable config, FileExistsError if
    ``out`` holds something else, OSError if the disk is too small.
    """
    name, config = shapes.load_config(config_or_name)
    record = _record(name, config, seed, shard_bytes)
    out = Path(out)
    if _holds(out, record):
        return out
    plan = _plan(config, shard_bytes)
    total = sum(size for _, _, size in plan)
    out.parent.mkdir(parents=True, exist_ok=True)
    _check_space(out, total)
    # The outer folder is private; the inner one has the permissions that OUT is to have.
    outer = Path(tempfile.mkdtemp(prefix=f".{out.name}.making-", dir=out.parent))
    try:
        folder = outer / "model"
        folder.mkdir()
        _write_texts(folder, config, record)
        _write_tensors(folder, config, seed, plan, device or _device_for(total))
        os.rename(folder, out)
    finally:
        shutil.rmtree(outer, ignore_errors=True)
    return out


def config_hash(config: dict[str, Any]) -> str:
    """sha256 of the config's content, whatever its order and spacing."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def _record(name: str, config: dict[str, Any], seed: int, shard_bytes: int) -> dict[str, Any]:
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed is {seed!r}; it must be an integer of 0 or more")
    return {
        "name": name,
        "config_sha256": config_hash(config),
        "seed": seed,
        "generator": GENERATOR,
        "shard_bytes": shard_bytes,
    }


def _holds(out: Path, record: dict[str, Any]) -> bool:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    try:
        found = json.loads((out / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise FileExistsError(f"{out} exists and is not a made-up model; give another folder")
    differs = [k for k in record if k != "name" and found.get(k) != record[k]]
    if differs:
        raise FileExistsError(
            f"{out} holds the made-up model {found.get('name')} with another {', '.join(differs)}; "
            "give another folder"
        )
    return True


def _check_space(out: Path, total: int) -> None:
    free = shutil.disk_usage(out.parent).free
    if free < total + _SPARE_BYTES:
        raise OSError(
            f"{out.parent} has {free / 1e9:.1f} GB free and the model takes {total / 1e9:.1f} GB; "
            "free some space or give another folder"
        )


def _device_for(total: int) -> str:
    if total < _SMALLEST_FOR_GPU:
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _dtype_name(config: dict[str, Any]) -> str:
    found = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    found = found.removeprefix("torch.")
    if found not in _DTYPES:
        raise ValueError(f"dtype is {found!r}; made-up weights come in {', '.join(_DTYPES)}")
    return found


def _plan(
    config: dict[str, Any], shard_bytes: int
) -> list[tuple[str, dict[str, tuple[Parameter, int]], int]]:
    """(file name, tensor name -> (parameter, offset in the data), bytes of data) of each file."""
    item = _DTYPES[_dtype_name(config)][1]
    shards: list[dict[str, tuple[Parameter, int]]] = [{}]
    sizes = [0]
    for p in shapes.parameters(config):
        if sizes[-1] and sizes[-1] + p.numel * item > shard_bytes:
            shards.append({})
            sizes.append(0)
        shards[-1][p.name] = (p, sizes[-1])
        sizes[-1] += p.numel * item
    n = len(shards)
    names = [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]
    if n == 1:
        names = ["model.safetensors"]
    return list(zip(names, shards, sizes, strict=True))


def _write_texts(folder: Path, config: dict[str, Any], record: dict[str, Any]) -> None:
    max_length = config.get("max_position_embeddings") or 32768
    tokenizer.write_tokenizer(folder, config["vocab_size"], max_length)
    generation = {
        "bos_token_id": tokenizer.EOS,
        "eos_token_id": [tokenizer.EOS, tokenizer.IM_END],
        "pad_token_id": tokenizer.PAD,
    }
    texts = {"config.json": config, "generation_config.json": generation, RECORD: record}
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_tensors(
    folder: Path, config: dict[str, Any], seed: int, plan: Sequence[tuple], device: str
) -> None:
    import torch
    from tqdm import tqdm

    dtype_name = _dtype_name(config)
    code, item = _DTYPES[dtype_name]
    dtype = getattr(torch, dtype_name)
    total = sum(size for _, _, size in plan)
    _write_index(folder, plan, total)
    bar = tqdm(total=total, unit="B", unit_scale=True, desc=folder.parent.parent.name, disable=None)
    with bar, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        jobs = []
        for name, tensors, _ in plan:
            header = _header(tensors, code, item)
            (folder / name).write_bytes(header)
            for p, offset in tensors.values():
                job = (folder / name, len(header) + offset, p, seed, dtype, device)
                jobs.append(pool.submit(_write_tensor, *job, bar.update))
        try:
            for job in jobs:
                job.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _write_tensor(path: Path, offset: int, p: Parameter, seed: int, dtype, device, advance) -> None:
    import torch

    with torch.inference_mode(), path.open("r+b", buffering=0) as file:
        file.seek(offset)
        for part in weights.chunks(p, seed, dtype, device):
            data = part.cpu().view(torch.uint8).numpy().data
            written = 0
            while written < len(data):
                written += file.write(data[written:])
            advance(len(data))


def _header(tensors: dict[str, tuple[Parameter, int]], code: str, item: int) -> bytes:
    """A safetensors header: its length in 8 bytes, then JSON, padded to 8 bytes."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, (p, offset) in tensors.items():
        end = offset + p.numel * item
        table[name] = {"dtype": code, "shape": list(p.shape), "data_offsets": [offset, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_index(folder: Path, plan: Sequence[tuple], total: int) -> None:
    if len(plan) == 1:
        return
    weight_map = {tensor: name for name, tensors, _ in plan for tensor in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
