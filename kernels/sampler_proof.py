"""The proof at start-up that the sampler of this device draws what it has always drawn.

Logits are whole numbers of 2^-20, so that every device makes the same ones. The tokens were found
by an emulator of the GPU's kernels on a CPU; a row has the same one alone and among others.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from sgl_det.kernels.sampler import sample

ROWS, VOCAB = 24, 32_003  # a row that ends in the middle of four ids
_ALL = 1 << 30
# temperature, top_k, top_p, min_p
_SETTINGS = (
    *((1.0, 1, 1.0, 0.0), (0.8, _ALL, 1.0, 0.0), (0.7, 50, 1.0, 0.0), (1.0, _ALL, 0.9, 0.0)),
    *((1.2, _ALL, 1.0, 0.05), (0.9, 40, 0.95, 0.02), (1.5, 20_000, 0.999, 0.0), (2.0, 3, 0.5, 0.9)),
)
# Of each row.
TOKENS = (
    *(23205, 16034, 6250, 6743, 12202, 19372, 28150, 3268, 5933, 9111, 503, 14091),
    *(19303, 26917, 26245, 20241, 46, 18501, 1223, 2120, 12846, 173, 22270, 34),
)


_BOTH = ("sampler.py", "sampler_arguments.py")
_GPU = ("primitives.cuh", "sampler.cu", "sampler_math.cuh", "sampler_row.cuh")
_SOURCES = {"cpu": (*_BOTH, "cpu_sampler.c")}
_SOURCES["cuda"] = (*_BOTH, "gpu_sampler.py", *(f"cuda/{name}" for name in _GPU))


def sources(device: str) -> str:
    """Twelve hex digits over the sources of the sampler on a "cpu" or "cuda", for the key."""
    here = Path(__file__).parent
    text = b"".join((here / name).read_bytes() for name in _SOURCES[device])
    return hashlib.sha256(text).hexdigest()[:12]


def case(device: torch.device | str) -> tuple[torch.Tensor, ...]:
    """The arguments of `sample` for ROWS rows; in the last eight rows many logits are equal."""
    row = torch.arange(ROWS, dtype=torch.int64)[:, None]
    mixed = (torch.arange(VOCAB, dtype=torch.int64) * 2_654_435_761 + row * 40_503_001) % 2**32
    mixed = (mixed ^ mixed >> 15) * 2_246_822_519 % 2**32
    steps = (mixed ^ mixed >> 13) % (24 * 2**20)
    steps[16:] = steps[16:] // 2**20 * 2**20
    logits = (steps.to(torch.float32) * 2.0**-20 - 12.0).to(device)
    settings = zip(*(_SETTINGS[i % len(_SETTINGS)] for i in range(ROWS)), strict=True)
    temperatures, top_ks, top_ps, min_ps = (torch.tensor(x, device=device) for x in settings)
    seeds = torch.arange(ROWS, device=device) * (2**33 + 7)
    positions = torch.arange(ROWS, device=device) * 1_000_003
    return logits, temperatures, top_ks, top_ps, min_ps, seeds, positions


def check(device: torch.device | str = "cuda") -> str:
    """The name of the kernel that serves. Raises RuntimeError where a token is another one."""
    arguments = case(device)
    whole = sample(*arguments).tolist()
    alone = [sample(*(x[i : i + 1] for x in arguments)).item() for i in range(ROWS)]
    for what, found in (("", whole), (" alone", alone)):
        wrong = [i for i, (a, b) in enumerate(zip(found, TOKENS, strict=True)) if a != b]
        if wrong:
            i = wrong[0]
            raise RuntimeError(
                f"the sampler draws token {found[i]} in row {i}{what}, expected {TOKENS[i]} "
                f"({len(wrong)} of {ROWS} rows differ); it is not proven for this GPU: report it"
            )
    return "sgl_det"
