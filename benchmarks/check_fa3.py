"""FA3 on this GPU: is its order what is planned with, and what do chunks cost and gain?

usage: check_fa3.py --out FILE [--only NAMES] [--seconds 110]

One JSON line a finding in FILE, as it comes. A check compares bits: {"part", "case", "differ"} with
the number of elements of o and lse that differ, "want" (0, or "some" for a control that must
differ) and "ok". A time is {"part", "case", "us": {arm: microseconds}}. A part that raises, or runs
out of its seconds, leaves {"part", "error"} and the next one runs. Needs sgl_kernel, no SGLang.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from fa3_pool import MODELS, Pool, at, differ
from fa3_times import decode_times, prefill_times

from sgl_det.kernels import fa3_chunks
from sgl_det.kernels.fa3_chunks import told_longest
from sgl_det.kernels.graph_timing import captured

SOME = "some"
POSITIONS = (0, 1, 126, 127, 128, 129, 191, 192, 255, 256, 1000, 2047, 2048, 2500)

Say = Callable[..., None]


def positions(say: Say, model: str) -> None:
    """Checks 1, 2, 3 and 5: one row in decode, in prefill, in a chunk, among others."""
    n, (heads, groups, d) = 2501, MODELS[model]
    pool = Pool(model, [n, 700, 64, 3])
    whole = pool.rows([n], [n], [0])
    for name, options in {"decode": {}, "long pin": {"pin": 64 // (heads // groups) + 2}}.items():
        bad = sum(
            differ(pool.rows([p + 1], [1], [0], **options), at(whole, [p])) for p in POSITIONS
        )
        say(f"{model} {name} = prefill", bad)
    for size in (7, 64, 127, 129, 512):
        parts = [pool.rows([min(e + size, n)], [min(size, n - e)], [0]) for e in range(0, n, size)]
        joined = torch.cat([o for o, _ in parts]), torch.cat([x for _, x in parts], 1)
        say(f"{model} chunks of {size} = one shot", differ(joined, whole))
    packed = pool.rows([n, 700, 64, 3], [n, 700, 64, 3])
    say(f"{model} packed = alone", differ(at(packed, slice(0, n)), whole))
    mixed = pool.rows([700, n, 3], [300, 1, 1], [1, 0, 2])
    say(f"{model} decode beside a prefill", differ(at(mixed, [300]), at(whole, [n - 1])))
    two = told_longest(d, heads // groups, 2)
    step, full = (pool.rows([n], [1], [0], causal=c, pin=two) for c in (True, False))
    say(f"{model} causal = not, one row", differ(full, step))
    past = pool.rows([n], [64], [0], causal=False)
    each = [pool.rows([n], [1], [0], causal=False, skip=i) for i in (0, 30, 63)]
    say(
        f"{model} rows of a past chunk = alone",
        sum(map(differ, (at(past, [63 - i]) for i in (0, 30, 63)), each)),
    )
    for batch in (256, 1000):
        many = pool.rows([n] * batch, [1] * batch, [0] * batch)
        say(f"{model} batch of {batch}", differ(at(many, [batch - 1]), at(whole, [n - 1])))


def pins(say: Say, model: str = "64 g8") -> None:
    """Check 4: heads of 64 have two tiles, and the longest query picks one."""
    pool, g = Pool(model, [1000, 300]), MODELS[model][0] // MODELS[model][1]
    whole = at(pool.rows([1000], [1000], [0]), [999])
    say(f"{model} decode unpinned", differ(pool.rows([1000], [1], [0], pin=None), whole), SOME)
    for rows, want in ((64 // g, SOME), (64 // g + 1, 0)):
        part = pool.rows([1000], [rows], [0], pin=None)
        say(f"{model} extend of {rows}, unpinned", differ(at(part, [rows - 1]), whole), want)
    say(f"{model} decode pinned", differ(pool.rows([1000], [1], [0]), whole))


def chunks(say: Say, model: str) -> None:
    """Check 8: decode and prefill by the planner, in any company, in a graph and without."""
    c = 2 * fa3_chunks.TILES[MODELS[model][2]] * 2
    ends = [c - 1, c, c + 1, 3 * c + 5, 1, 7 * c]
    pool, every = Pool(model, ends), list(range(len(ends)))
    whole = pool.chunked([0] * len(ends), ends, c)
    last = [sum(ends[: i + 1]) - 1 for i in every]
    step = pool.decoded(ends, c)()
    say(f"{model} chunked decode = prefill", differ(step, at(whole, last)))
    for how in ({"most_rows": 999}, {"many_rows": 1}, {"many_rows": 1 << 30}):
        say(f"{model} {how}", differ(pool.chunked([0] * len(ends), ends, c, **how), whole))
    hit = [e // 2 for e in ends]
    rest = pool.chunked(hit, [e - p for e, p in zip(ends, hit, strict=True)], c)
    kept = [i for b, e in enumerate(ends) for i in range(last[b] - e + 1 + hit[b], last[b] + 1)]
    say(f"{model} after a prefix = prefill", differ(rest, at(whole, kept)))
    alone = sum(differ(pool.decoded([ends[b]], c, [b])(), at(step, [b])) for b in every)
    say(f"{model} alone = batch", alone)
    wide = pool.decoded(ends * 11, c, every * 11)()
    say(f"{model} batch of 66", differ(at(wide, [i + 60 for i in every]), step))
    short = pool.rows([c], [1], [1])
    say(f"{model} one chunk = plain call", differ(at(step, [1]), short))
    long = pool.rows([7 * c], [1], [5])
    say(f"{model} seven chunks, plain call", differ(at(step, [5]), long), SOME)
    error = (step[0][5].float() - long[0][0].float()).abs().max().item()
    say(f"{model} seven chunks, error of o", int(error > 0.02), error=error)
    graphed, kept = pool.decoded(ends, c, spare=37), {}
    graph = captured([lambda: kept.update(o=graphed())])
    graph.replay()
    torch.cuda.synchronize()
    say(f"{model} graph = eager", differ(kept["o"], step))


def splits(say: Say, model: str = "128 g4") -> None:
    """Check 9: FA3's own splits follow the batch; metadata made before changes nothing."""
    from sgl_kernel.flash_attn import get_scheduler_metadata

    pool, b = Pool(model, [6000, 6000]), [0] * 64
    few = pool.rows([6000], [1], [0], num_splits=4)
    many = at(pool.rows([6000] * 64, [1] * 64, b, num_splits=4), [0])
    say(f"{model} 4 splits, batch of 64", differ(few, many), SOME)
    for name in (model, "64 g8"):
        pool = Pool(name, [6000, 77])
        sizes = {"num_heads": pool.heads, "num_heads_k": pool.groups, "headdim": pool.d}
        lengths, starts = (torch.tensor(x).int().cuda() for x in ([6000, 77], [0, 1, 2]))
        made = get_scheduler_metadata(
            batch_size=2,
            max_seqlen_q=told_longest(pool.d, pool.heads // pool.groups, 1),
            max_seqlen_k=6000,
            cache_seqlens=lengths,
            qkv_dtype=torch.bfloat16,
            cu_seqlens_q=starts,
            page_size=1,
            causal=True,
            num_splits=1,
            **sizes,
        )
        given = pool.rows([6000, 77], [1, 1], scheduler_metadata=made)
        say(f"{name} metadata given = none", differ(given, pool.rows([6000, 77], [1, 1])))


def edges(say: Say, model: str) -> None:
    """Check 10 and section 4: sequences without keys, the sink, NaN in what is not read."""
    pool = Pool(model, [600, 300])
    before, both = pool.rows([600, 300], [1, 1]), pool.rows([300, 300], [1, 1])
    o, lse = pool.rows([0, 300], [1, 1])
    wrong = int((o[0] != 0).sum()) + int((lse[:, 0] != float("-inf")).sum())
    say(f"{model} no keys: o 0, lse -inf", wrong)
    say(f"{model} beside no keys", differ(at((o, lse), [1]), at(before, [1])))
    sink = torch.linspace(-1, 2, pool.heads, device="cuda", dtype=torch.bfloat16)
    _, with_sink = pool.rows([600, 300], [1, 1], sinks=sink)
    exact = torch.logaddexp(before[1], sink.float()[:, None])
    far = float((with_sink - exact).abs().max())
    say(f"{model} lse holds the sink", int(far > 1e-3), None, far=far)
    # Later tokens of request 0, and what its neighbour's table holds past its keys.
    pool.v[pool.table[0, 300:].long()] = float("nan")
    pool.v[pool.table[1, -1].long()] = float("nan")
    say(f"{model} NaN after the keys, decode", differ(pool.rows([300, 300], [1, 1]), both))
    leak = pool.rows([600], [600], [0])[0][:300].isnan().flatten(1).any(1).sum()
    say(f"{model} rows of a prefill that see NaN of later tokens", int(leak), None)


def parts() -> Iterator[tuple[str, float, Callable[[Say], None]]]:
    """Name, seconds and function of each part; what may end the process comes last."""
    held = [m for m in MODELS if not m.startswith("256")]
    yield "pins", 8, pins
    for model in ("128 g4", "64 g8", *(m for m in held if m not in ("128 g4", "64 g8"))):
        yield f"positions {model}", 8, partial(positions, model=model)
        yield f"chunks {model}", 12, partial(chunks, model=model)
    yield "splits", 8, splits
    for model in ("128 g4", "64 g4"):
        yield f"decode {model}", 40, partial(decode_times, model=model)
        yield f"prefill {model}", 20, partial(prefill_times, model=model)
    for model in ("128 g4", "64 g8"):
        yield f"edges {model}", 8, partial(edges, model=model)
    for model in ("256 g4",):
        yield f"positions {model}", 8, partial(positions, model=model)
        yield f"chunks {model}", 8, partial(chunks, model=model)


def out_of_time(*_args) -> None:
    raise TimeoutError("out of the seconds of this part")


def write(file, entry: dict) -> None:
    line = json.dumps(entry) + "\n"
    for target in (file, sys.stdout):
        target.write(line)
        target.flush()


def run_part(file, name: str, seconds: float, part: Callable[[Say], None]) -> bool:
    """Run one part, write what it finds, and say whether all was as wanted."""
    good = True

    def say(case: str, found: int | dict, want: int | str | None = 0, **more) -> None:
        nonlocal good
        if isinstance(found, dict):
            write(file, {"part": name, "case": case, "us": found, **more})
            return
        ok = want is None or (found > 0) == (want == SOME)
        good &= ok
        write(file, {"part": name, "case": case, "differ": found, "want": want, "ok": ok, **more})

    start = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        part(say)
        torch.cuda.synchronize()
    except Exception as error:  # whatever a kernel or library raises, the other parts run
        good = False
        write(file, {"part": name, "error": f"{type(error).__name__}: {error}"[:600]})
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    write(file, {"part": name, "seconds": round(time.monotonic() - start, 1)})
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="parts whose names contain one of these, by ,")
    parser.add_argument("--seconds", type=float, default=110)
    args = parser.parse_args()
    signal.signal(signal.SIGALRM, out_of_time)
    end, good, wanted = time.monotonic() + args.seconds, True, args.only.split(",")
    with args.out.open("a", encoding="utf-8") as file:
        gpu = torch.cuda.get_device_name()
        write(file, {"gpu": gpu, "torch": torch.__version__, "chunks": fa3_chunks.CHUNKS})
        for name, seconds, part in parts():
            if not any(word in name for word in wanted):
                continue
            left = end - time.monotonic()
            if left < 1:
                write(file, {"part": name, "error": "no time left"})
                continue
            good &= run_part(file, name, min(seconds, left), part)
            torch.cuda.empty_cache()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
