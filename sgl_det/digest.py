"""A digest of a model's weights that is the same on every device and in every process.

Each tensor's bytes are read as 64-bit words w[i] and reduced to  sum_i mix(w[i] + (i + 1) * C)
modulo 2**64. Integer sums wrap exactly, so the order in which a device adds them does not show.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_WORDS = 1 << 22  # words per step: bounds the temporary memory to a few hundred MiB


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_STEP = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER = _signed(0xBF58476D1CE4E5B9)


def of_tensor(tensor: torch.Tensor) -> int:
    """Order-sensitive 64-bit hash of a tensor's bytes. Cost: about ten passes over them."""
    import torch

    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    total = 0
    for start in range(0, flat.numel(), 8 * _WORDS):
        part = flat[start : start + 8 * _WORDS]
        if part.numel() % 8 or part.storage_offset() % 8:
            part = torch.nn.functional.pad(part, (0, -part.numel() % 8))
        words = part.view(torch.int64)
        index = torch.arange(1, words.numel() + 1, device=words.device) + start // 8
        mixed = words + index * _STEP
        mixed ^= mixed >> 29
        mixed *= _MULTIPLIER
        mixed ^= mixed >> 32
        total += int(mixed.sum())
    return total & (1 << 64) - 1


def of_model(model: torch.nn.Module) -> str:
    """SHA-256, first 16 hex digits, over name, dtype, shape and hash of parameters and buffers.

    Tied tensors count under each of their names. Buffers that are not part of a checkpoint (the
    rotary tables) follow from the configuration and are left out.
    """
    total = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        head = f"{name} {tensor.dtype} {tuple(tensor.shape)} {of_tensor(tensor):016x}\n"
        total.update(head.encode())
    return total.hexdigest()[:16]
