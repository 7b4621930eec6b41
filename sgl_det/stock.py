"""``python -m sgl_det.stock <sglang flags>``: SGLang as released, with none of our patches.

The control arm of the demo, the tests and the benchmarks. On a machine without a GPU SGLang cannot
import its CUDA-only ``sgl_kernel``, so there the stand-in is installed first; nothing else changes.
"""

from __future__ import annotations

import os
import runpy
import sys


def _prepare() -> None:
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    from sgl_det.patches import sgl_kernel_stub

    sgl_kernel_stub.install()


def _main() -> None:
    import torch

    if not torch.cuda.is_available():
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    _prepare()
    sys.argv[0] = "sglang.launch_server"
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)


# Spawned workers import the parent's main module under this name before their own target.
if __name__ == "__mp_main__":
    _prepare()
elif __name__ == "__main__":
    _main()
