"""Triton attention: ours beside SGLang's heuristic kernels, with the bits of every way compared.

usage: bench_attention.py --out FILE [--shape qwen3-8b] [--seconds 200]

The lines of FILE (`case_file`): op is "triton decode" or "triton prefill", m the number of
requests, n their keys, k the head size. Arms: `upstream` (the kernel and splits of SGLang's normal
mode), `served` (what our server launches), and ours with other numbers of programs a request
(decode) or other query tiles (prefill). A mismatch is an element whose bits differ from ours in one
program, or for prefill from decode at the last token.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from case_file import CaseFile
from graph_timing import Arm, in_turn

from sgl_det.kernels import attention_order
from sgl_det.kernels.attention import Launch, Options, attention
from sgl_det.kernels.attention_decode import Work, decode_attention
from sgl_det.kernels.proof_cache import machine
from sgl_det.patches import decode_programs

# query heads, key heads, head size
SHAPES = {"qwen3-8b": (32, 8, 128), "qwen2.5-7b": (28, 4, 128), "llama-3.2-1b": (32, 8, 64)}
# 256 x 32768 keys of one layer would be 34 GB, and SGLang's kernel counts in 32 bits.
DECODE = [(b, n) for b in (1, 4, 16, 64, 256) for n in (512, 2048, 8192, 32768)][:-1]
PREFILL = [(8, 1024), (2, 4096), (1, 16384)]
SHARED = (1, 4, 16)
LAUNCHES = {"128 rows, 3 stages": Launch(128, 8, 3), "64 rows": Launch(64, 4, 3)}
FIELDS = ("op", "m", "n", "k", "dtype", "tp", "shape")


class Case:
    """Requests of n keys each, scattered over a pool, and what upstream needs beside them."""

    def __init__(self, shape: str, m: int, n: int, new: int):
        heads, groups, d = SHAPES[shape]
        kwargs = {"device": "cuda", "dtype": torch.bfloat16}
        self.m, self.n, self.new, self.heads, self.groups, self.d = m, n, new, heads, groups, d
        self.k, self.v = (torch.empty(m * n, groups, d, **kwargs).normal_() for _ in range(2))
        self.q = torch.empty(m * new, heads, d, **kwargs).normal_()
        self.table = torch.randperm(m * n, device="cuda").int().view(m, n)
        self.rows = torch.arange(m, device="cuda")
        self.lengths = torch.full((m,), n, device="cuda", dtype=torch.int64)
        self.starts = torch.arange(0, m * new + 1, new, device="cuda", dtype=torch.int64)
        self.options = Options(d**-0.5)

    def decode(self, shared: int, work: Work | None, **launch) -> torch.Tensor:
        last = self.q[self.new - 1 :: self.new]
        pools = (self.k, self.v, self.table, self.rows, self.lengths)
        return decode_attention(last, *pools, self.options, work=work, shared=shared, **launch)

    def prefill(self, launch: Launch | None) -> torch.Tensor:
        pools = (self.k, self.v, self.table, self.rows, self.starts, self.lengths)
        return attention(self.q, *pools, self.new, self.options, launch=launch)

    def upstream_decode(self):
        """A call of SGLang's decode kernel, with the splits that normal mode chooses."""
        from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
        from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton

        most, q = 8, self.q[self.new - 1 :: self.new].contiguous()
        splits = torch.empty(self.m, dtype=torch.int32, device="cuda")
        cores = torch.cuda.get_device_properties(0).multi_processor_count
        sizes = (self.m, 1, self.heads, self.groups, most, cores)
        get_num_kv_splits_triton[(1,)](splits, self.lengths, *sizes, MAX_NUM_SEQ=256)
        parts = torch.empty(self.m, self.heads, most, self.d, device="cuda")
        lse = torch.empty(self.m, self.heads, most, device="cuda")
        starts = torch.arange(0, self.m * self.n + 1, self.n, device="cuda", dtype=torch.int32)
        slots, o = self.table.view(-1), torch.empty_like(q)
        paged = (self.k, self.v, o, starts, slots, parts, lse, splits, most, self.options.scale)
        return partial(decode_attention_fwd, q, *paged, 1.0, 1.0, use_pdl=True)

    def upstream_prefill(self):
        """A call of SGLang's extend kernel on prompts without a prefix."""
        from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

        k, v = (x[self.table.view(-1).long()] for x in (self.k, self.v))
        none = torch.zeros(self.m + 1, dtype=torch.int32, device="cuda")
        slots, o = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.empty_like(self.q)
        args = (self.q, k, v, o, self.k, self.v, self.starts, none, slots, None, True, None)
        scale = self.options.scale
        return partial(extend_attention_fwd, *args, self.new, 1.0, 1.0, sm_scale=scale)

    def differs(self, call: Callable[[], torch.Tensor], expected: torch.Tensor) -> int:
        """Elements of the requests' last tokens whose bits differ; decode has no others."""
        found = call()
        if len(found) > self.m:
            found = found[self.new - 1 :: self.new].contiguous()
        return int((found.view(torch.int16) != expected.view(torch.int16)).sum())


def not_compared() -> None:
    """Upstream has an order of its own."""


def measure_decode(case: Case) -> dict:
    expected = case.decode(1, None)
    # As a server has it, whose longest context is 40960.
    sizes = (
        case.heads,
        case.groups,
        case.d,
        40960,
        attention_order.own(case.d, torch.device("cuda")),
    )
    work = decode_programs.work_for(*sizes, torch.device("cuda"))
    repeat = max(1, min(16, 100_000_000 // (case.m * case.n * case.groups * case.d * 4)))
    arms = {"upstream": lambda: Arm("upstream", [case.upstream_decode()] * repeat, not_compared)}
    order = attention_order.own(case.d, torch.device("cuda"))
    served = decode_programs.shared(work, case.m, case.groups, order)
    call = partial(case.decode, served, work)
    arms["served"] = partial(Arm, "served", [call] * repeat, partial(case.differs, call, expected))
    for shared in SHARED:
        if shared == 1 or shared * case.m * case.groups <= 4096:
            call = partial(case.decode, shared, work)
            differs = partial(case.differs, call, expected)
            arms[f"shared {shared}"] = partial(Arm, f"shared {shared}", [call] * repeat, differs)
    return in_turn(arms)


def measure_prefill(case: Case) -> dict:
    expected = case.decode(1, None)
    arms = {"upstream": lambda: Arm("upstream", [case.upstream_prefill()] * 2, not_compared)}
    for name, launch in {"served": None, **LAUNCHES}.items():
        call = partial(case.prefill, launch)
        arms[name] = partial(Arm, name, [call] * 2, partial(case.differs, call, expected))
    return in_turn(arms)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", default="qwen3-8b", choices=SHAPES)
    parser.add_argument("--seconds", type=float, default=200)
    args = parser.parse_args()
    header = {"machine": machine(), "bits": "ours in every way, prefill against decode"}
    file, end = CaseFile(args.out, header, FIELDS), time.monotonic() + args.seconds
    plan = [("prefill", m, n) for m, n in PREFILL] + [("decode", m, n) for m, n in DECODE]
    for op, m, n in plan:
        entry = {
            "op": f"triton {op}",
            "m": m,
            "n": n,
            "k": SHAPES[args.shape][2],
            "dtype": "bf16",
            "tp": 1,
        }
        entry |= {"shape": args.shape}
        if entry in file or time.monotonic() > end:
            continue
        case = Case(args.shape, m, n, n if op == "prefill" else 1)
        entry |= measure_prefill(case) if op == "prefill" else measure_decode(case)
        file.add(entry)
        sys.stdout.write(json.dumps(entry) + "\n")
        sys.stdout.flush()
        del case
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
