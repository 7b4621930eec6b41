"""Weights from (seed, tensor name, element index), by integer arithmetic alone.

Element   h = splitmix64(key + index * GOLDEN), key = sha256(generator, seed, tensor name)
          z = the four 16-bit fields of h, summed and centred: close to normal, |z| < 3.47 std
          w = mean + z * scale, in fp32, rounded once to the checkpoint's dtype
Bits depend on   GENERATOR, seed, the tensor's name and shape, its mean, std and dtype
                 not on the device, the threads, the other tensors, the shards, the chunking

The hash is exact in int64 on every device, and each fp32 step is one IEEE operation, so a CPU and a
GPU write equal bytes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Raise it with any change that alters a byte of a checkpoint: the keys and the cache path have it.
GENERATOR = 1

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_FIELDS = 0x0000FFFF0000FFFF
_CENTRE = 2 * 65535
_FIELD_SUM_STD = math.sqrt(4 * (65536**2 - 1) / 12)

# On a CPU, as large as torch runs on one thread, so that the writer's threads do not nest; it also
# fits the L2 cache. On a GPU, large enough to hide the launches.
_CHUNK = {"cpu": 1 << 15, "cuda": 1 << 24}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One tensor of the checkpoint. ``quiet`` rows (ids) are scaled by 1/4."""

    name: str
    shape: tuple[int, ...]
    mean: float
    std: float
    quiet: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def chunks(
    parameter: Parameter, seed: int, dtype: torch.dtype, device: str
) -> Iterator[torch.Tensor]:
    """Yield the tensor's values as flat tensors of ``dtype`` on ``device``, in storage order."""
    import torch

    rows = parameter.shape[0]
    cols = parameter.numel // rows
    step = max(1, _CHUNK[torch.device(device).type] // cols)
    key = _key(seed, parameter.name)
    scale = _as_fp32(parameter.std / _FIELD_SUM_STD)
    loudness = None
    if parameter.quiet:
        loudness = torch.ones(rows, 1)
        loudness[list(parameter.quiet)] = 0.25
        loudness = loudness.to(device)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        z = _centred_sums(key, first * cols, last * cols, device)
        # Two operations, never one fused multiply-add: each rounds the same way on every device.
        w = z.to(torch.float32).mul_(scale)
        if parameter.mean:
            w = w.add_(parameter.mean)
        if loudness is not None:
            w = (w.view(-1, cols) * loudness[first:last]).view(-1)
        yield w.to(dtype)


def _centred_sums(key: int, start: int, stop: int, device: str) -> torch.Tensor:
    """int64 [stop - start]: sums of four 16-bit fields, less their mean."""
    import torch

    x = torch.arange(start, stop, dtype=torch.int64, device=device)
    x.mul_(_signed(_GOLDEN)).add_(_signed(key))
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, None)):
        # >> keeps the sign in int64: the mask makes it the shift of an unsigned number.
        x ^= (x >> shift) & ((1 << (64 - shift)) - 1)
        if factor is not None:
            x.mul_(_signed(factor))
    pairs = (x & _FIELDS) + ((x >> 16) & _FIELDS)
    return (pairs & 0xFFFFFFFF) + (pairs >> 32) - _CENTRE


def _key(seed: int, name: str) -> int:
    text = f"sgl_det weights {GENERATOR}\0{seed}\0{name}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _as_fp32(value: float) -> float:
    import torch

    return torch.tensor(value, dtype=torch.float32).item()
