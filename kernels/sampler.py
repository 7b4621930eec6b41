"""One token a row, drawn from the logits that the row's parameters keep.

    token = argmax over kept v of  x[v] + gumbel(seed, position, v),   x = logits / temperature

Kept is a token that is, in the order of falling x and then rising ids, one of the first top_k;
before which the others hold at most top_p of all probability; and that has at least min_p of the
probability of the first one. top_k = 1 is the largest logit, the first of equal ones.

Shapes      logits [N, V]; temperatures, top_ks, top_ps, min_ps, seeds, positions: N -> token [N]
Dtypes      logits, temperatures, top_ps, min_ps fp32; the others, and tokens, whole numbers
Order       none: probabilities are added as whole numbers of 2^-40 of the largest
Bits depend on   the row, its parameters, seed and position - not on N, nor on what is asked of
                 other rows; where nothing is filtered, or only one token is kept, work is skipped

The noise has 32 bits: word v mod 4 of Philox4x32-10 with the seed as its key and the counter
(v div 4, position, 0). Sources: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011);
Gumbel (1954) for the maximum.

On a CUDA GPU `gpu_sampler` draws it. There and here the numbers are rounded in other places: tokens
differ only where two of them, or a token and a limit, are as close as that.
"""

from __future__ import annotations

import struct

import torch

from sgl_det.kernels import cpu, gpu_sampler
from sgl_det.kernels.sampler_arguments import checked

_ARGUMENTS = struct.Struct("=8Q3qi4x")


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """token [N] int64, where the logits are; a NaN among them counts as -inf.

    temperatures > 0; top_ks >= 1; top_ps in (0, 1]; min_ps in [0, 1]. Raises ValueError on other
    shapes or dtypes.
    """
    named = {"temperatures": temperatures, "top_ks": top_ks, "top_ps": top_ps, "min_ps": min_ps}
    named |= {"seeds": seeds, "positions": positions}
    if logits.is_cuda:
        return gpu_sampler.sample(logits, **named)
    given = checked(logits, (torch.int64,), **named)
    if not logits.is_cpu:
        raise ValueError(f"sample: logits are on {logits.device}, expected a CPU or a CUDA GPU")
    n, vocab = logits.shape
    token = torch.empty(n, dtype=torch.int64)
    pointers = [x.data_ptr() for x in (*given, token)]
    sizes = n, given.logits.stride(0), vocab, torch.get_num_threads()
    cpu.library().sgl_det_sample(_ARGUMENTS.pack(*pointers, *sizes))
    return token
