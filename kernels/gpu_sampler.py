"""One token a row on a CUDA GPU: the launches of `cuda/sampler.cu`, four for any batch

Shapes      logits [N, V]; temperatures, top_ks, top_ps, min_ps, seeds, positions: N -> token [N]
Dtypes      logits, temperatures, top_ps, min_ps fp32; the others whole numbers, tokens int64;
            weights and noise are made of fp32, rounded one by one: every GPU has the same
Order       none: weights are whole numbers of 2^-40 of the largest, and all else is a maximum
Bits depend on   the row, its parameters, seed and position - not on N, nor on what is asked of
                 other rows, nor on a `Launch`

Nothing waits for the GPU, and memory is asked for by shapes: it can be captured in a graph. What a
row does not need, its thread blocks leave out: without a filter the logits are read once, with
top_k or top_p three times.
"""

from __future__ import annotations

from ctypes import c_int
from functools import cache
from typing import NamedTuple

import torch

from sgl_det.kernels import nvrtc
from sgl_det.kernels.sampler_arguments import Arguments, checked

SOURCE = "sampler.cu"
TOP, TALLY, CHOOSE, FINISH = STEPS = range(4)
BINS = 2048
# The whole numbers that the kernels read; bit i of `wide` says that the i-th has eight bytes.
_WHOLE = (torch.int64, torch.int32)
_HOPPER = 9


class Launch(NamedTuple):
    """Threads of a thread block, of one in the last step; ids that it can sort; blocks to have."""

    threads: int
    finish: int
    listed: int
    blocks: int


LAUNCH = Launch(256, 512, 4096, 1024)


def defines(step: int, launch: Launch) -> dict[str, int]:
    """What a step's source is compiled with."""
    return {"STEP": step, "THREADS": threads(step, launch), "LIST": launch.listed}


def threads(step: int, launch: Launch) -> int:
    """Of a thread block."""
    return launch.finish if step == FINISH else launch.threads


def shared_bytes(step: int, launch: Launch) -> int:
    """Of memory a thread block; the layout is that of struct Shared in the source."""
    always = 32 * 16 + 32 * 8 + 6 * 8
    tally, listed = BINS * 12, launch.listed * 8
    return always + {TALLY: tally, FINISH: max(tally, listed)}.get(step, 0)


def row_words(slices: int, launch: Launch) -> int:
    """Of eight bytes, in which the steps tell each other of a row: struct Note in the source."""
    return 8 + 4 * slices + 2 * BINS + launch.listed


def slices_of(n: int, vocab: int, launch: Launch) -> int:
    """Parts of a row: enough for the whole GPU, but no thread without four ids."""
    most = -(-vocab // (4 * launch.threads))
    return max(1, min(most, -(-launch.blocks // n)))


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    launch: Launch = LAUNCH,
) -> torch.Tensor:
    """token [N] int64, as `sampler.sample` says. Raises ValueError, or RuntimeError at a launch."""
    given = checked(
        logits,
        _WHOLE,
        temperatures=temperatures,
        top_ks=top_ks,
        top_ps=top_ps,
        min_ps=min_ps,
        seeds=seeds,
        positions=positions,
    )
    n, vocab = logits.shape
    token = torch.empty(n, dtype=torch.int64, device=logits.device)
    if n:
        slices = slices_of(n, vocab, launch)
        size = n * row_words(slices, launch)
        scratch = torch.empty(size, dtype=torch.int64, device=logits.device)
        run(given, token, scratch, slices, launch)
    return token


def run(
    given: Arguments, token: torch.Tensor, scratch: torch.Tensor, slices: int, launch: Launch
) -> None:
    """The steps, each of which may begin while the kernel before it still runs, and waits."""
    logits = given.logits
    if not logits.is_cuda:
        raise ValueError(f"sample: logits are on {logits.device}, expected a CUDA GPU")
    with torch.cuda.device(logits.device):
        arch, early = _architecture(logits.device.index)
        for step in STEPS:
            found = nvrtc.function(
                SOURCE,
                defines(step, launch),
                arch,
                threads(step, launch),
                shared_bytes(step, launch),
            )
            grid = (len(logits), 1 if step == FINISH else slices, 1)
            found.launch(grid, *arguments(given, token, scratch, slices), early=early)


def arguments(
    given: Arguments, token: torch.Tensor, scratch: torch.Tensor, slices: int
) -> tuple[torch.Tensor | int | c_int, ...]:
    """Of every step."""
    whole = given.top_ks, given.seeds, given.positions
    wide = sum((x.dtype == torch.int64) << i for i, x in enumerate(whole))
    sizes = given.logits.stride(0), given.logits.shape[1], c_int(slices), c_int(wide)
    return *given, token, scratch, *sizes


@cache
def _architecture(device: int) -> tuple[str, bool]:
    """What to compile for, and whether a kernel may begin before the one ahead of it has ended."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}", major >= _HOPPER
