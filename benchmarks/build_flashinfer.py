"""Compile FlashInfer's FA2 modules from the edited headers, here, for a GPU elsewhere.

usage: build_flashinfer.py --out FILE.tar.xz [--arch 9.0a] [--dims 128,64,256]

FILE holds the modules under ``.cache/flashinfer``, to be unpacked into the home directory of the
machine with the GPU; copied into the folder ``data/aot`` of FlashInfer's package, each under its
name, they are not compiled there. About four minutes a module on one core. Needs nvcc, ninja and a
C compiler, but neither a GPU nor its driver.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from sgl_det.kernels import flashinfer_headers as headers


def specification(dim: int, edits: Iterable[headers.Edit]) -> Any:
    """FlashInfer's build specification of the bf16 module, from the headers with these edits."""
    from flashinfer.jit import env, gen_batch_prefill_module

    types = (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int32)
    spec = gen_batch_prefill_module("fa2", *types, dim, dim, 0, False, False, False)
    copy = headers.patched_copy(env.FLASHINFER_INCLUDE_DIR, env.FLASHINFER_WORKSPACE_DIR, edits)
    return headers.with_headers(spec, copy)


def _without_driver(folder: Path) -> str:
    """A linker flag for an empty library in the place of the driver's, which is not here."""
    source = folder / "empty.c"
    source.write_text("")
    flags = ("-shared", "-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so"))
    subprocess.run(["gcc", *flags, str(source)], check=True)
    return f"-L{folder}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arch", default="9.0a")
    parser.add_argument("--dims", default="128,64,256")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FLASHINFER_EXTRA_LDFLAGS"] = _without_driver(Path(folder))
        os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", args.arch)
        specs = [specification(int(dim), headers.EDITS) for dim in args.dims.split(",")]
        for spec in specs:
            start = time.monotonic()
            if not spec.jit_library_path.exists():
                spec.build(verbose=False)
            print(f"{spec.name}: {time.monotonic() - start:.0f} s", flush=True)
    from flashinfer.jit import env

    with tarfile.open(args.out, "w:xz") as archive:
        for spec in specs:
            archive.add(
                spec.jit_library_path, spec.jit_library_path.relative_to(env.FLASHINFER_BASE_DIR)
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
