"""Compiles CUDA C++ by NVRTC, once per source, options and compiler, and launches it.

NVRTC and its bindings come with torch; no CUDA toolkit is needed. What was compiled lies in the
user's cache.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sgl_det.kernels import sealed
from sgl_det.kernels.cpu_build import cache_folder

SOURCES = Path(__file__).parent / "cuda"
# Products and sums are fused only where the source says so.
_OPTIONS = ("--std=c++17", "--fmad=false")
_TYPES = {float: ctypes.c_float, int: ctypes.c_longlong}


class Function(NamedTuple):
    """A kernel that is loaded on one GPU."""

    handle: Any
    threads: int
    shared: int

    def launch(self, grid: tuple[int, int, int], *arguments: Any, early: bool = False) -> None:
        """On torch's current stream. Tensors go by their address, None as a null pointer.

        A whole number is 8 bytes in the kernel, or 4 as ctypes.c_int. early: it may begin before
        the kernel ahead of it has ended, and waits itself. Raises RuntimeError.
        """
        from cuda.bindings import driver

        values, types = zip(*map(_argument, arguments), strict=True)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes = self.shared
        config.hStream = torch.cuda.current_stream().cuda_stream
        if early:
            attribute = driver.CUlaunchAttribute()
            ids = driver.CUlaunchAttributeID
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        _check(driver.cuLaunchKernelEx(config, self.handle, (values, types), 0))


def _argument(x: Any) -> tuple[Any, Any]:
    if x is None or isinstance(x, torch.Tensor):
        return (0 if x is None else x.data_ptr()), ctypes.c_void_p
    if isinstance(x, ctypes._SimpleCData):
        return x.value, type(x)
    return x, _TYPES[type(x)]


def function(
    source: str, defines: Mapping[str, int], arch: str, threads: int, shared: int
) -> Function:
    """The kernel of the name of its ``source`` on the current GPU, compiled if it was not yet.

    defines  names and values for the preprocessor; arch: sm_90a and the like
    threads  of a thread block; shared: bytes of memory it asks for at launch
    Raises RuntimeError where it does not compile, or does not fit the GPU.
    """
    return _loaded(
        source, tuple(sorted(defines.items())), arch, threads, shared, torch.cuda.current_device()
    )


@cache
def _loaded(source, defines, arch, threads, shared, device) -> Function:
    from cuda.bindings import driver

    image = compiled(source, dict(defines), arch)
    (module,) = _check(driver.cuModuleLoadData(image))
    (handle,) = _check(driver.cuModuleGetFunction(module, source.removesuffix(".cu").encode()))
    dynamic = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _check(driver.cuFuncSetAttribute(handle, dynamic, shared))
    return Function(handle, threads, shared)


def compiled(source: str, defines: Mapping[str, int], arch: str) -> bytes:
    """The machine code of a source in `SOURCES`. Raises RuntimeError with what the compiler says.

    No GPU is needed.
    """
    from cuda.bindings import nvrtc

    headers = {path.name: path.read_bytes() for path in sorted(SOURCES.glob("*.cuh"))}
    text = (SOURCES / source).read_bytes()
    options = [*_OPTIONS, f"--gpu-architecture={arch}"]
    options += [f"-D{name}={value}" for name, value in sorted(defines.items())]
    digest = hashlib.sha256(repr((text, headers, options, _check(nvrtc.nvrtcVersion()))).encode())
    target = cache_folder() / "cuda" / f"{Path(source).stem}-{digest.hexdigest()[:16]}.cubin"
    image = sealed.read(target)
    if image is None:
        image = _compile(source, text, headers, [o.encode() for o in options])
        sealed.write(target, image)
    return image


def _compile(source: str, text: bytes, headers: Mapping[str, bytes], options: list[bytes]) -> bytes:
    from cuda.bindings import nvrtc

    names = [name.encode() for name in headers]
    program = nvrtc.nvrtcCreateProgram(
        text, source.encode(), len(headers), list(headers.values()), names
    )
    (program,) = _check(program)
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        (size,) = _check(nvrtc.nvrtcGetProgramLogSize(program))
        log = b" " * size
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"{source} does not compile: {log.decode(errors='replace').strip()}")
    (size,) = _check(nvrtc.nvrtcGetCUBINSize(program))
    image = b" " * size
    _check(nvrtc.nvrtcGetCUBIN(program, image))
    return image


def _check(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a call gave, or RuntimeError with the name of its error."""
    status, *found = answer
    if status.value:
        raise RuntimeError(f"the CUDA driver or NVRTC says {status.name}")
    return tuple(found)
