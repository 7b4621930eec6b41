"""What we change upstream: one file per owner, collected here explicitly.

Importing this package imports neither SGLang nor torch.
"""

from __future__ import annotations

from sgl_det.patch import Patch
from sgl_det.patches import (
    cpu,
    fa3,
    fa3_graphs,
    fa3_start,
    flashinfer,
    gpu,
    grammar,
    launcher,
    logit_processors,
    logprobs,
    norms,
    penalties,
    requests,
    routes,
    sampler,
    scheduler,
    seeds,
    triton,
    waits,
    worker,
)


def _gpu() -> tuple[Patch, ...]:
    return (*gpu.patches(), *norms.patches())


_BACKENDS = {
    "flashinfer": lambda: (*_gpu(), *flashinfer.patches()),
    "fa3": lambda: (*_gpu(), *fa3_start.patches(), *fa3.patches(), *fa3_graphs.patches()),
    "triton": lambda: (*_gpu(), *triton.patches()),
    "torch_native": lambda: (*cpu.patches(), *grammar.patches()),
}


def for_launcher(hook: launcher.Hook | None) -> tuple[Patch, ...]:
    """Patches of the process that serves HTTP or holds the Engine."""
    ours = (*requests.patches(), *seeds.patches(), *routes.patches())
    return (*launcher.patches(hook), *ours)


def for_worker(observer: worker.Observer) -> tuple[Patch, ...]:
    """Patches of every scheduler process."""
    sampling = (logprobs, sampler, penalties, logit_processors, waits)
    ours = (p for module in (*sampling, scheduler) for p in module.patches())
    return (*worker.patches(observer), *ours)


def for_backend(name: str) -> tuple[Patch, ...]:
    """Patches of a scheduler process that runs this attention backend."""
    return _BACKENDS[name]()


def all_patches() -> tuple[Patch, ...]:
    """Every patch there is, for the ledger and for `sgl-det check`."""
    ours = (*for_launcher(hook=None), *for_worker(observer=None))
    every = (*ours, *(p for make in _BACKENDS.values() for p in make()))
    return tuple({p.name: p for p in every}.values())
