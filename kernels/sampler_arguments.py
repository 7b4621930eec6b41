"""What every sampler takes, checked in one place: see `sampler`

Shapes      logits [N, V]; each of the others N, in any shape
Dtypes      logits fp32; the others are made so, or int64, unless a kernel reads what they are
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_WHOLE = ("top_ks", "seeds", "positions")


class Arguments(NamedTuple):
    """Logits whose columns lie side by side, and the parameters [N] of their rows."""

    logits: torch.Tensor
    temperatures: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    top_ks: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor


def checked(
    logits: torch.Tensor, whole: tuple[torch.dtype, ...], **parameters: torch.Tensor
) -> Arguments:
    """The arguments by name; whole numbers stay what they are if that is one of ``whole``.

    Raises ValueError on other shapes or dtypes, or where they lie on several devices.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32 or not logits.shape[1]:
        raise ValueError(
            f"sample: logits are {logits.dtype} {tuple(logits.shape)}, expected fp32 [N, V]"
        )
    n = len(logits)
    for name, x in parameters.items():
        if x.numel() != n:
            raise ValueError(f"sample: {x.numel()} {name} for {n} rows")
        if x.device != logits.device:
            raise ValueError(f"sample: {name} are on {x.device}, logits on {logits.device}")
        kept = whole if name in _WHOLE else (torch.float32,)
        x = x if x.dtype in kept else x.to(kept[0])
        parameters[name] = x.reshape(n).contiguous()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    return Arguments(logits=logits, **parameters)
