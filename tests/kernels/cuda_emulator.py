"""`cuda/fa3_chain.cu` on a CPU: built by g++ against `cuda_emulator.h`, a coroutine a thread."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

from sgl_det.kernels import fa3_chain, nvrtc

HERE = Path(__file__).parent
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="no g++ for the emulator")
# Copies are carried out as late as they may be, or at once.
lazy = True

_ENTRY = f"""
#define EMULATED
#include "{HERE / "cuda_emulator.h"}"
#include "{nvrtc.SOURCES / fa3_chain.SOURCE}"
extern "C" int of_threads() {{ return THREADS; }}
extern "C" int of_bytes() {{ return sizeof(Shared); }}
extern "C" void emulate(const u16 *v, const int *table, const int *lengths, const float *scores,
                        const float *tops, float *parts, float *ends, u16 *o,
                        const long long *strides, const int *sizes, float log2, bool lazy) {{
    const Place grid{{D / DV, sizes[0] * sizes[2], sizes[3]}};
    emulator::run(grid, THREADS, sizeof(Shared), lazy, [=] {{
        fa3_chain(v, table, lengths, scores, tops, parts, ends, o, strides[0], strides[1],
                  strides[2], strides[3], strides[4], strides[5], sizes[0], sizes[1], sizes[2],
                  sizes[3], log2);
    }});
}}
"""


@cache
def built(d, group, chunk, single, launch) -> ctypes.CDLL:
    """The emulated kernel, of the launch that it is compiled for."""
    named = fa3_chain.defines(d, group, chunk, single, launch)
    flags = "-x c++ -std=c++17 -O1 -ffp-contract=off -fPIC -shared -w -o".split()
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        command = ["g++", *flags, file.name, *(f"-D{k}={v}" for k, v in named.items()), "-"]
        subprocess.run(command, input=_ENTRY, text=True, check=True)
        return ctypes.CDLL(file.name)


def attend(
    v_pool, table, lengths, scores, tops, parts, ends, o, longest, log2, *, chunks, chunk, launch
):
    """As `fa3_chain.attend`."""
    batch, heads, d = o.shape
    groups = v_pool.shape[1]
    library = built(d, heads // groups, chunk, parts is None, launch)
    strides = v_pool.stride(0), v_pool.stride(1), table.stride(0), scores.stride(1)
    strides += o.stride(0), o.stride(1)
    library.emulate(
        *(
            ctypes.c_void_p(None if x is None else x.data_ptr())
            for x in (v_pool, table, lengths, scores, tops, parts, ends, o)
        ),
        (ctypes.c_longlong * 6)(*strides),
        (ctypes.c_int * 4)(groups, longest, chunks, batch),
        ctypes.c_float(log2),
        ctypes.c_bool(lazy),
    )
