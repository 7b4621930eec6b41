"""Compile FlashInfer's paged kernels from a folder of headers, and read what came out; no GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from .compile_targets import CUOBJDUMP

# Those that FlashInfer's build passes and that reach the arithmetic.
FLAGS = ["-std=c++17", "-use_fast_math", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr"]
_HEAD = """
#include <cstdio>
#include <flashinfer/attention/default_prefill_params.cuh>
#include <flashinfer/attention/prefill.cuh>
namespace flashinfer {
using E = __nv_bfloat16;
using Params = BatchPrefillPagedParams<E, E, E, int32_t>;
using Variant = DefaultAttention<false, false, false, false>;
}
using namespace flashinfer;
"""
_KERNEL = """namespace flashinfer {{
template __global__ void BatchPrefillWithPagedKVCacheKernel<
    KernelTraits<MaskMode::kCausal, {tile}, {mma_q}, 4, {d}, {d}, {warps}, 1,
    PosEncodingMode::kNone, E, E, E, float, int32_t, Variant>, Params>(
    const __grid_constant__ Params);
}}
"""
_LAUNCH = r"""
extern int per_sm, per_block;
template <int T, int D>
void launch() {
  Params p;
  p.padded_batch_size = 1;
  printf("%d %d ", T, D);
  try {
    BatchPrefillWithPagedKVCacheDispatched<T, D, D, PosEncodingMode::kNone, false,
                                           MaskMode::kCausal, Variant, Params>(
        p, nullptr, nullptr, false, nullptr);
  } catch (std::exception&) {
    puts("0 0 0 0");
  }
}
template <int D>
void all() { launch<16, D>(); launch<64, D>(); launch<128, D>(); }
int main(int, char** argv) {
  per_sm = atoi(argv[1]);
  per_block = atoi(argv[2]);
  all<64>();
  all<128>();
  all<256>();
}
"""
_STUBS = r"""
#include <cstdio>
int per_sm, per_block;
struct dim3 { unsigned x, y, z; };
extern "C" {
int cudaGetDevice(int* d) { *d = 0; return 0; }
int cudaDeviceGetAttribute(int* v, int a, int) {
  *v = a == 81 ? per_sm : a == 97 ? per_block : 0;
  return 0;
}
int cudaFuncSetAttribute(const void*, int, int) { return 0; }
int cudaLaunchKernel(const void*, dim3, dim3 b, void**, size_t bytes, void*) {
  printf("%u %u %u %zu\n", b.x, b.y, b.z, bytes);
  return 0;
}
}
"""


class Launch(NamedTuple):
    """What FlashInfer's dispatch launches: a block's threads and shared memory; 0 if it raised."""

    tile: int
    dim: int
    x: int
    warps_q: int
    warps_kv: int
    shared: int


def include_folder() -> Path | None:
    """Where FlashInfer's headers are, or None; FlashInfer is not imported."""
    found = find_spec("flashinfer")
    if found is None or not found.submodule_search_locations:
        return None
    folder = Path(found.submodule_search_locations[0]) / "data" / "include"
    return folder if folder.is_dir() else None


def includes(headers: Path) -> list[str]:
    """Flags that find ``headers`` first, as FlashInfer's own build does with an extra folder."""
    data = include_folder().parent
    cccl = ("cub", "libcudacxx/include", "thrust")
    flags = [f"-I{headers}", *(f"-I{data / 'cccl' / name}" for name in cccl)]
    return [*flags, "-isystem", str(include_folder())]


def nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc") or (home and shutil.which(f"{home}/bin/nvcc")) or None


def opcodes(headers: Path, folder: Path, dims: tuple[int, ...]) -> dict[tuple[int, int], Counter]:
    """How often each instruction occurs in the kernel of (head size, query tile), for sm_90a."""
    shapes = ((16, 1, 1), (64, 1, 4), (128, 2, 4))
    text = _HEAD + "".join(
        _KERNEL.format(tile=t, mma_q=m, warps=w, d=dim // 16) for dim in dims for t, m, w in shapes
    )
    (folder / "kernels.cu").write_text(text)
    cubin = folder / "kernels.cubin"
    _nvcc(headers, "-arch=sm_90a", "-cubin", folder / "kernels.cu", "-o", cubin)
    done = subprocess.run([CUOBJDUMP, "-sass", cubin], capture_output=True, text=True, check=True)
    counts: dict[tuple[int, int], Counter] = {}
    for line in done.stdout.splitlines():
        if name := re.search(r"Function : \S*MaskModeE1ELj(\d+)ELj\dELj4ELj(\d+)E", line):
            current = counts.setdefault((int(name[2]) * 16, int(name[1])), Counter())
        elif code := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)", line):
            current[re.match(r"MUFU\.\w+|[A-Z0-9_]+", code[1])[0]] += 1
    return counts


def launcher(headers: Path, folder: Path) -> Path:
    """A program that calls the dispatch for each tile and head size, with a stub for CUDA."""
    (folder / "launch.cu").write_text(_HEAD + _LAUNCH)
    (folder / "stubs.cpp").write_text(_STUBS)
    program = folder / "launch"
    # PTX alone: the device code is not looked at. Of two definitions the first, ours, counts.
    flags = ("-gencode", "arch=compute_90a,code=compute_90a", "-Xlinker")
    sources = (folder / "launch.cu", folder / "stubs.cpp", "-o", program)
    _nvcc(headers, *flags, "--allow-multiple-definition", *sources)
    return program


def launches(program: Path, per_sm: int, per_block: int) -> list[Launch]:
    """What it launches on a GPU with that much shared memory, in bytes."""
    command = [str(program), str(per_sm), str(per_block)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [Launch(*map(int, line.split())) for line in done.stdout.splitlines()]


def _nvcc(headers: Path, *arguments: object) -> None:
    command = [nvcc(), *FLAGS, *includes(headers), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def available() -> bool:
    return bool(nvcc()) and CUOBJDUMP.exists()
