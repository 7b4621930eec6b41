"""FlashInfer's own C++ scheduler, compiled as host code, to compare our planner with."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

UNWRITTEN = 0x5A
_MAIN = r"""
#include <flashinfer/attention/scheduler.cuh>
#include <cstdio>
#include <iostream>
using namespace flashinfer;
static char ints[32 << 20] __attribute__((aligned(256)));
static char host[32 << 20] __attribute__((aligned(256)));
static char floats[256] __attribute__((aligned(256)));
int main() {
  int b, rows, hq, hk, hd, graph, split, whole;
  while (std::cin >> b >> rows >> hq >> hk >> hd >> graph >> split >> whole) {
    std::vector<int> qo(b + 1), kv(b + 1);
    for (auto& x : qo) std::cin >> x;
    for (auto& x : kv) std::cin >> x;
    std::fill(host, host + sizeof host, (char)0x5a);
    PrefillPlanInfo p;
    size_t f, n;
    try {
      PrefillPlan<int>(floats, (size_t)1 << 40, ints, host, sizeof ints, p, qo.data(), kv.data(),
                       rows, b, hq, hk, hd, hd, 1, graph, 2, -1, split, whole, 0, nullptr);
      PrefillPlanWorkspaceSize<int>(f, n, qo.data(), kv.data(), rows, b, hq, hk, hd, hd, 1, graph,
                                    2, -1, split, whole, 0, nullptr);
    } catch (std::exception&) {
      puts("raised");
      continue;
    }
    for (auto x : p.ToVector()) printf("%ld ", (long)x);
    for (size_t i = 0; i < n; i++) printf("%02x", (unsigned char)ints[i]);
    puts("");
  }
}
"""
# Answers for a GPU of 132 multiprocessors, compute capability 9.
_STUBS = r"""
#include <cstring>
extern "C" {
int cudaGetDevice(int* d) { *d = 0; return 0; }
int cudaDeviceGetAttribute(int* v, int a, int) { *v = a == 16 ? 132 : a == 75 ? 9 : 0; return 0; }
int cudaMemcpyAsync(void* d, const void* s, size_t n, int, void*) { memcpy(d, s, n); return 0; }
}
"""


@dataclass(frozen=True)
class Ask:
    """One call of PrefillPlan with page size 1; ``split`` 0 leaves the split to its heuristic."""

    qo: tuple[int, ...]  # indptr
    kv: tuple[int, ...]  # indptr
    heads: tuple[int, int, int]  # query heads, KV heads, head size
    rows: int
    graph: bool = False
    split: int = 0
    one_pass: bool = False

    def line(self) -> str:
        numbers = (len(self.qo) - 1, self.rows, *self.heads, int(self.graph))
        numbers += (self.split or -1, int(self.one_pass), *self.qo, *self.kv)
        return " ".join(map(str, numbers))


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


def build(folder: Path) -> Path:
    """The program; about half a minute."""
    (folder / "main.cu").write_text(_MAIN)
    (folder / "stubs.cpp").write_text(_STUBS)
    program = folder / "scheduler"
    flags = ["-std=c++17", "-O1", *includes(include_folder()), "-arch=sm_90"]
    flags += ["-Xlinker", "--allow-multiple-definition"]  # the first one counts: our stubs
    sources = [str(folder / "main.cu"), str(folder / "stubs.cpp")]
    done = subprocess.run([nvcc(), *flags, *sources, "-o", str(program)], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return program


def ask(program: Path, asks: list[Ask]) -> list[tuple[list[int], np.ndarray] | None]:
    """For each: the vector and the image, or None where it raised."""
    text = "\n".join(a.line() for a in asks)
    done = subprocess.run([program], input=text, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(asks)
    return [None if line == "raised" else _parsed(line) for line in lines]


def _parsed(line: str) -> tuple[list[int], np.ndarray]:
    *vector, image = line.split(" ")
    return [int(x) for x in vector], np.frombuffer(bytes.fromhex(image), np.uint8)
