"""Our CUDA kernels on a CPU: built by g++ against `cuda_emulator.h`, a coroutine a thread."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

from sgl_det.kernels import fa3_chain, gpu_sampler, nvrtc

HERE = Path(__file__).parent
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="no g++ for the emulator")
# Copies are carried out as late as they may be, or at once.
lazy = True
# In which order blocks, warps and lanes run; 0 is the plain one.
order = 0

_CHAIN = f"""
#define EMULATED
#include "{HERE / "cuda_emulator.h"}"
#include "{nvrtc.SOURCES / fa3_chain.SOURCE}"
extern "C" void of_order(u32 x) {{ emulator::order = x; }}
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

# All steps in one library: their number is a variable.
_SAMPLER = f"""
#define EMULATED
#include "{HERE / "cuda_emulator.h"}"
static int this_step;
#define STEP this_step
#include "{nvrtc.SOURCES / gpu_sampler.SOURCE}"
extern "C" void of_order(u32 x) {{ emulator::order = x; }}
extern "C" int of_bytes(int of) {{
    const int kept[] = {{offsetof(Shared, tally), sizeof(Tally) + offsetof(Shared, tally)}};
    return of == 3 ? sizeof(Shared) : kept[of == 1];
}}
extern "C" void of_noise(u32 *counter, const u32 *key, float *noise) {{
    u32 words[4];
    memcpy(words, counter, 16);
    philox(words, key[0], key[1]);
    memcpy(counter, words, 16);
    for (int x = 0; x < 4; x++) noise[x] = gumbel(words[x]);
}}
extern "C" void of_words(const u32 *words, float *noise, int many) {{
    for (int x = 0; x < many; x++) noise[x] = gumbel(words[x]);
}}
extern "C" u64 of_weight(float x, float most) {{ return weight_of(x, most); }}
extern "C" void emulate(int of, int rows, const float *logits, const float *temperatures,
                        const float *top_ps, const float *min_ps, const void *top_ks,
                        const void *seeds, const void *positions, long long *token, u64 *scratch,
                        long long ld, long long vocab, int slices, int wide, int bytes) {{
    this_step = of;
    emulator::run(Place{{rows, of == 3 ? 1 : slices, 1}}, THREADS, bytes, false, [=] {{
        sampler(logits, temperatures, top_ps, min_ps, top_ks, seeds, positions, token, scratch, ld,
                vocab, slices, wide);
    }});
}}
"""


# What the sources of the emulated kernels say, and what they say instead in a control.
changed: tuple[str, str] | None = None


@cache
def built(d, group, chunk, single, launch, change=None) -> ctypes.CDLL:
    """The emulated kernel, of the launch that it is compiled for."""
    return _compiled(_CHAIN, fa3_chain.defines(d, group, chunk, single, launch), change)


def _compiled(text, named, change) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        if change:
            for path in nvrtc.SOURCES.iterdir():
                (Path(folder) / path.name).write_text(path.read_text().replace(*change))
            text = text.replace(str(nvrtc.SOURCES), folder)
        return _built(text, named)


def _built(text, named) -> ctypes.CDLL:
    flags = "-x c++ -std=c++17 -O1 -ffp-contract=off -fPIC -shared -w -o".split()
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        command = ["g++", *flags, file.name, *(f"-D{k}={v}" for k, v in named.items()), "-"]
        subprocess.run(command, input=text, text=True, check=True)
        return ctypes.CDLL(file.name)


def attend(
    v_pool, table, lengths, scores, tops, parts, ends, o, longest, log2, *, chunks, chunk, launch
):
    """As `fa3_chain.attend`."""
    batch, heads, d = o.shape
    groups = v_pool.shape[1]
    library = built(d, heads // groups, chunk, parts is None, launch, changed)
    library.of_order(order)
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


def sampler(launch) -> ctypes.CDLL:
    """The emulated sampler; its last step has as many threads as the others."""
    assert launch.threads == launch.finish
    return _sampler(launch, changed)


@cache
def _sampler(launch, change) -> ctypes.CDLL:
    library = _compiled(_SAMPLER, {"THREADS": launch.threads, "LIST": launch.listed}, change)
    library.of_weight.restype = ctypes.c_ulonglong
    library.of_weight.argtypes = [ctypes.c_float, ctypes.c_float]
    return library


def run_sampler(given, token, scratch, slices, launch):
    """As `gpu_sampler.run`."""
    library = sampler(launch)
    values = [
        ctypes.c_void_p(x.data_ptr()) if isinstance(x, torch.Tensor) else x
        for x in gpu_sampler.arguments(given, token, scratch, slices)
    ]
    values = [ctypes.c_longlong(x) if isinstance(x, int) else x for x in values]
    library.of_order(order)
    for step in gpu_sampler.STEPS:
        size = ctypes.c_int(gpu_sampler.shared_bytes(step, launch))
        library.emulate(step, len(token), *values, size)
