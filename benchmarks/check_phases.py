"""FA3 and FlashInfer as patched: are a row's bits equal in every phase, for many shapes of heads?

usage: check_phases.py --out FILE [--backends fa3,flashinfer] [--seconds 100]

The proof of the start-up (`kernels/phases_proof.py`), in one process and without a server, with the
patches applied: for GQA ratios of 1, 4, 7 and 8, head sizes of 64 and 128, and contexts to 32k. And
what it leaves out: whole prompts in chunks of one size, and a long one beside many short ones.
Every line of FILE is JSON: {"backend", "heads", "longest", "found"}, "found" being "" where no bit
differs; and for each backend a control that must find something, whose decode takes other splits.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch

from sgl_det.kernels.attention_proof import Heads
from sgl_det.kernels.flashinfer_order import KV_TILE, SPLIT
from sgl_det.kernels.phases_proof import first_mismatch, lengths
from sgl_det.patch import PatchSet
from sgl_det.patches import decode_programs, fa3, fa3_start, flashinfer

# query heads, key heads, head size
SHAPES = [(32, 8, 128), (14, 2, 64), (4, 4, 128), (16, 2, 128), (28, 4, 128), (32, 8, 64)]
SHAPES += [(4, 4, 64), (16, 2, 64)]
LONG = 32768
# A long request, some that straddle chunks, and many short ones.
COMPANY = (8192 + 77, 4100, 1030, 513, *range(1, 60))
SIZES = (1, 17, 64, 512, 8192)


def in_company(of):
    """Steps as `phases_proof` takes them: name, (request, keys, new tokens), decode."""
    for size in SIZES:
        # All chunks of the prompts that are long enough, up to 60 of each size.
        ends = [(i, end) for i, n in enumerate(of) for end in range(size, n + 1, size)]
        for at in range(0, min(len(ends), 240), 60):
            steps = [(i, end, size) for i, end in ends[at : at + 60]]
            yield f"in chunks of {size} tokens", steps, False
    yield "beside many short ones", [(i, n, n) for i, n in enumerate(of)], False
    yield "in decode, one long", [(i, n, 1) for i, n in enumerate(of)], True
    yield "in decode, one token later", [(i, n - 1 or 1, 1) for i, n in enumerate(of)], True


def fa3_attend(_heads: Heads):
    return fa3_start.attend


def flashinfer_attend(heads: Heads):
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

    from sgl_det.kernels.flashinfer_order import ORDER

    scratch = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    sizes = (heads.queries, heads.keys, heads.d, 2 * LONG, ORDER, torch.device("cuda"))
    flashinfer._STATE.work = decode_programs.work_for(*sizes)
    decode = BatchDecodeWithPagedKVCacheWrapper(scratch, "NHD", use_tensor_cores=True)
    prefill = BatchPrefillWithPagedKVCacheWrapper(scratch, "NHD", backend="fa2")
    backend = SimpleNamespace(decode_wrappers=[decode], prefill_wrappers_paged=[prefill])
    return lambda step: flashinfer.attend(backend, step)


@contextmanager
def other_fa3():
    from sgl_det.kernels import fa3_chunks

    kept, fa3_chunks.CHUNKS[128] = fa3_chunks.CHUNKS[128], 2048
    try:
        yield
    finally:
        fa3_chunks.CHUNKS[128] = kept


@contextmanager
def other_flashinfer():
    from sgl_det.kernels import flashinfer_order

    kept = flashinfer_order.ORDER
    flashinfer_order.ORDER = type(kept)(kept.block, kept.split // 2, kept.reciprocal)
    try:
        yield
    finally:
        flashinfer_order.ORDER = kept


BACKENDS = {
    "fa3": (fa3_attend, fa3.patches, (128, 4096), other_fa3),
    "flashinfer": (flashinfer_attend, flashinfer.patches, (KV_TILE, SPLIT), other_flashinfer),
}


def controlled(attend, other):
    """Decode in another order than everything else."""

    def run(step):
        if not step.decode:
            return attend(step)
        with other():
            return attend(step)

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--seconds", type=float, default=100)
    args = parser.parse_args()
    end, good = time.monotonic() + args.seconds, True
    with args.out.open("a", encoding="utf-8") as file:

        def say(**line) -> None:
            for stream in (file, sys.stdout):
                stream.write(json.dumps(line) + "\n")
                stream.flush()

        for name in args.backends.split(","):
            make, patches, edges, other = BACKENDS[name]
            PatchSet(patches()).apply()
            for i, (queries, keys, d) in enumerate(SHAPES):
                if time.monotonic() > end:
                    say(backend=name, heads=[queries, keys, d], error="no time left")
                    continue
                heads = Heads(queries=queries, keys=keys, d=d, dtype=torch.bfloat16)
                of = (*lengths(*edges), LONG + 1) if i < 2 else lengths(*edges)
                attend = make(heads)
                found = first_mismatch(attend, heads, of, short=edges[1])
                found = found or first_mismatch(attend, heads, COMPANY, others=in_company)
                good &= not found
                say(backend=name, heads=[queries, keys, d], longest=max(of), found=found)
                if not i:
                    control = first_mismatch(controlled(attend, other), heads, of, short=edges[1])
                    good &= bool(control)
                    say(backend=name, heads=[queries, keys, d], control=control)
                torch.cuda.empty_cache()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
