"""FlashInfer's FA2 kernel in one order: are the bits equal in every phase, and what does it cost?

usage: check_flashinfer.py --out FILE [--parts bits,control,graph,host,decode,prefill]

Needs a GPU, FlashInfer and nvcc, but no server. Every line of FILE is JSON and is written at once;
a part that fails or runs out of time loses only its own rest, unless the GPU is lost to the process
(an illegal access, say): then no other part is run, and the exit status is 1.
Lines of bits, control and graph count [rows that differ from those of one prefill of the whole
sequence, rows]. 0 is right in `bits` and `graph`, and in `control` where `expected` is "equal";
where it is "differs", 0 means that the check is blind. Lines of decode and prefill are those of
`graph_timing.in_turn`; for ours they count the rows that differ from those of calls without a
graph.
Modules that are compiled already are loaded as they are (`build_flashinfer.py` makes them).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from build_flashinfer import fa2_module
from flashinfer_calls import CONTEXT, POOL, QWEN, Call, Pool, differing
from time_flashinfer import decode, host, prefill

from sgl_det.kernels import flashinfer_headers as headers
from sgl_det.kernels.flashinfer_plan import ONE_PASS, Heads, decode_capture, decode_splits

DIMS, GROUPS = (128, 64, 256), (4, 1, 7, 8)
LENGTH, CHUNK = 2200, 1024
POSITIONS = (0, 1, 62, 63, 64, 65, 127, 128, 500, 1022, 1023, 1024, 1025, 2047, 2048, 2049, 2199)
STARTS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 1000, 1023, 1024, 1025, 2048, 2190)
LIMITS = {"bits": 45, "control": 15, "graph": 10, "host": 5, "decode": 50, "prefill": 30}


def compare(module, pool, expected, spans, **how) -> list[int]:
    """[rows that differ, rows]."""
    wanted = torch.cat([expected[r, f:e] for r, f, e in spans])
    return [differing(Call(module, pool, spans, **how)(), wanted), len(wanted)]


def whole(module, pool, cut: int = 0, **how) -> torch.Tensor:
    """[R, n, H, D]: each request prefilled at once, or in two chunks."""
    edges = [(0, cut), (cut, pool.n)] if cut else [(0, pool.n)]
    spans = [(r, *edge) for r in range(len(pool.q)) for edge in edges]
    return Call(module, pool, spans, **how)().view_as(pool.q)


def error_of(pool: Pool, rows: torch.Tensor) -> float:
    """The largest error against fp32 attention, at some positions of request 0."""
    k, v = (x[pool.table[0].long(), 0].float() for x in (pool.k, pool.v))
    k, v = (x.repeat_interleave(pool.heads.group, dim=1) for x in (k, v))
    worst = 0.0
    for p in POSITIONS:
        scores = torch.einsum("hd,shd->hs", pool.q[0, p].float(), k[: p + 1])
        found = torch.einsum("hs,shd->hd", (scores * pool.heads.dim**-0.5).softmax(1), v[: p + 1])
        worst = max(worst, float((found - rows[0, p].float()).abs().max()))
    return round(worst, 5)


def tiles(heads: Heads) -> tuple[int, ...]:
    return (16, 64) if heads.dim >= 256 else (16, 64, 128)


def bits(emit) -> None:
    for dim in DIMS:
        module = fa2_module(dim, headers.EDITS)
        for group in GROUPS:
            heads = Heads(qo=4 * group, kv=4, dim=dim)
            pool = Pool(heads, 3, LENGTH)
            how = {"tile": tiles(heads)[-1], "chunk": CHUNK}
            expected = whole(module, pool, **how)
            check = partial(compare, module, pool, expected)
            decode = [(p % 3, p, p + 1) for p in POSITIONS]
            cuts = [(0, s, min(s + size, LENGTH)) for s in STARTS for size in (1, 40, 200, LENGTH)]
            found = {"again": check([(r, 0, LENGTH) for r in range(3)], **how)}
            for tile in tiles(heads):
                found[f"whole {tile}"] = check([(1, 0, LENGTH)], tile=tile, chunk=CHUNK)
                found[f"cuts {tile}"] = check(cuts, tile=tile, chunk=CHUNK)
                for causal in (True, False):
                    name = f"decode {tile} {'causal' if causal else 'no mask'}"
                    found[name] = check(decode, tile=tile, chunk=CHUNK, causal=causal)
            for name, some in (("cut", cuts[::7]), ("decode", decode)):
                alone = [check([span], tile=16, chunk=CHUNK) for span in some]
                found[f"{name} alone"] = [sum(x) for x in zip(*alone, strict=True)]
            many = [(i % 3, p, p + 1) for i, p in enumerate(np.arange(256) * 8 % LENGTH)]
            found["decode of 256"] = check(many, tile=16, chunk=CHUNK, causal=False)
            # A row whose keys all lie in the first split: copied if alone, merged if not.
            one = whole(module, pool, tile=64, chunk=ONE_PASS)
            first = differing(one[0, :CHUNK].contiguous(), expected[0, :CHUNK].contiguous())
            found["one split or many"] = [first, CHUNK]
            shape = {"dim": dim, "group": group, "error": error_of(pool, expected)}
            emit({"part": "bits", **shape, "differing": found})


def control(emit) -> None:
    """The same without the edits; each must show what the edit is for.

    With one query head a KV head, and after a first chunk of one token, half of the query tiles
    cross the edge of a KV tile, so that their first rows meet a tile in which they see no key.
    """
    pool = Pool(Heads(qo=16, kv=16, dim=128), 3, LENGTH)
    every = [(r, p, p + 1) for r in range(3) for p in range(LENGTH)]
    cuts = [(0, s, LENGTH) for s in STARTS]
    for name, edits in (("stock", ()), ("exact rescale", headers.EXACT_RESCALE)):
        module = fa2_module(128, edits)
        expected = whole(module, pool, cut=1, tile=64, chunk=CHUNK)
        same = "equal" if edits else "differs"
        for what, spans, tile, wanted in (
            ("cuts", cuts, 64, same),
            ("decode", every, 64, same),
            ("decode", every, 16, "differs"),
            ("cuts", cuts, 128, "differs"),
        ):
            rows = compare(module, pool, expected, spans, tile=tile, chunk=CHUNK)
            line = {"headers": name, "check": f"{what}, tile {tile}", "expected": wanted}
            emit({"part": "control", **line, "differing": rows})
    module = fa2_module(128, headers.EDITS)
    expected = whole(module, pool, tile=64, chunk=CHUNK)
    line = {"headers": "all edits", "check": "another split size", "expected": "differs"}
    rows = compare(module, pool, expected, [(0, 0, LENGTH)], tile=64, chunk=CHUNK // 2)
    emit({"part": "control", **line, "differing": rows})


def graph(emit) -> None:
    """A captured batch of 32 is replayed with other lengths, then with fewer splits again."""
    pool, module = Pool(QWEN, 32, LENGTH), fa2_module(128, headers.EDITS)
    expected = whole(module, pool, tile=128, chunk=CHUNK)
    splits = decode_splits(32, CHUNK, context=CONTEXT, pool=POOL)
    how = {"tile": 16, "chunk": CHUNK, "causal": False}
    how["sizes"] = decode_capture(32, QWEN, 16, splits)
    captured = Call(module, pool, [(r, LENGTH - 1, LENGTH) for r in range(32)], **how)
    captured()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        captured()
    random, rows = np.random.default_rng(0), []
    for most in (1, LENGTH, 100, LENGTH // 2, LENGTH, 1):
        spans = [(r, p - 1, p) for r, p in enumerate(random.integers(1, most + 1, 32).tolist())]
        step = Call(module, pool, spans, **how)
        assert step.vector == captured.vector
        for name in ("ints", "q", "kv"):
            getattr(captured, name).copy_(getattr(step, name))
        captured.indices[: len(step.indices)] = step.indices
        recorded.replay()
        wanted = torch.cat([expected[r, f:e] for r, f, e in spans])
        rows.append([differing(captured.o, wanted), differing(step(), wanted)])
    emit({"part": "graph", "columns": ["replayed", "same sizes, eager"], "differing": rows})


PARTS = {f.__name__: f for f in (bits, control, graph, host, decode, prefill)}


def expired(*_: object) -> None:
    raise TimeoutError("out of time")


def run_part(emit: Callable[[dict], None], name: str, seconds: float) -> bool:
    """Run one part and write how it went; False if the GPU is lost to this process."""
    start, line = time.monotonic(), {"part": name}
    try:
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
        PARTS[name](emit)
        torch.cuda.synchronize()  # what a kernel did wrong is this part's error
    except Exception as error:  # the other parts are worth having, whatever this was
        line["error"] = f"{type(error).__name__}: {error}"[:600]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    emit({**line, "seconds": round(time.monotonic() - start, 1)})
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=115)
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    signal.signal(signal.SIGALRM, expired)
    with args.out.open("a") as file:

        def emit(line: dict) -> None:
            for stream in (file, sys.stdout):
                stream.write(json.dumps(line) + "\n")
                stream.flush()

        emit({"part": "begin", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__})
        names = args.parts.split(",")
        for i, name in enumerate(names, 1):
            if not run_part(emit, name, min(LIMITS[name], end - time.monotonic())):
                emit({"part": "end", "error": "the GPU is lost", "not_run": names[i:]})
                return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # where the GPU is lost, the destructors of pinned memory would abort
