"""A stand-in for the compiled package ``sgl_kernel`` on machines without a GPU.

The published wheel is built for CUDA and cannot be loaded there, yet SGLang imports names from it
in modules that the CPU path needs. The two helpers that plain PyTorch can express are written out;
any other name is a function that raises when called, so nothing is computed wrongly in silence.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

NAME = "sgl_kernel"


def _assign_req_to_token_pool(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len):
    """Scatter ``out_cache_loc`` [T] into rows of ``req_to_token`` [R, pool_len], in place."""
    offset = 0
    bounds = zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True)
    for row, lo, hi in bounds:
        req_to_token[row, lo:hi] = out_cache_loc[offset : offset + hi - lo].to(req_to_token.dtype)
        offset += hi - lo


def _assign_extend_cache_locs(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len):
    """Gather rows of ``req_to_token`` [R, pool_len] into ``out_cache_loc`` [T], in place."""
    offset = 0
    bounds = zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True)
    for row, lo, hi in bounds:
        out_cache_loc[offset : offset + hi - lo] = req_to_token[row, lo:hi].to(out_cache_loc.dtype)
        offset += hi - lo


def _unavailable(name: str):
    def call(*_args, **_kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU; this process runs on the CPU")

    call.__name__ = name
    return call


class _Stub(ModuleType):
    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        value = _unavailable(name)
        setattr(self, name, value)
        return value


def install() -> None:
    """Put the stand-in into ``sys.modules``, unless some ``sgl_kernel`` is there already."""
    if NAME in sys.modules:
        return
    module = _Stub(NAME)
    module.__version__ = "0+cpu"
    module.__path__ = []
    module.__spec__ = ModuleSpec(NAME, None, is_package=True)
    module.assign_req_to_token_pool_cpu = _assign_req_to_token_pool
    module.assign_extend_cache_locs_cpu = _assign_extend_cache_locs
    sys.modules[NAME] = module
