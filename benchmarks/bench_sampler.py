"""Samplers: ours beside what SGLang runs in its normal mode, our bits compared in the same run.

usage: bench_sampler.py --out FILE [--rows 1,16,64,256] [--seconds 120]

The lines of FILE (`case_file`) are those of bench_kernels.py: op names the setting, n is the number
of tokens, k is 0, m is the number of rows. Bits are right if each row has the token that it has
alone. The arms whose names end in "eager" are timed by events, launches included: a sampler runs
outside of the graph that a server captures, and not all of SGLang's can be captured.
Logits are rotated beyond the L2 cache.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from case_file import CaseFile, upstream
from graph_timing import Arm, copies, in_turn

from sgl_det import kernels
from sgl_det.kernels import proof_cache
from sgl_det.kernels.sampler import sample

VOCAB = 151936
ALL = 1 << 30
# temperature, top_k, top_p, min_p
SETTINGS = {
    "greedy": (1.0, 1, 1.0, 0.0),
    "temperature": (0.8, ALL, 1.0, 0.0),
    "top_k 50": (0.8, 50, 1.0, 0.0),
    "top_p 0.95": (0.8, ALL, 0.95, 0.0),
    "min_p 0.05": (0.8, ALL, 1.0, 0.05),
    "all": (0.8, 50, 0.95, 0.05),
}
BITS = "each row's own token, whatever the number of rows"
_SOURCES = ("gpu_sampler.py", "sampler.py", "sampler_arguments.py")
_CUDA = ("primitives.cuh", "sampler.cu", "sampler_math.cuh", "sampler_row.cuh")


class EagerArm(Arm):
    """Calls without a graph, by events."""

    def __init__(self, name: str, calls: Sequence[Callable[[], object]], mismatches):
        self.name, self.calls, self._count = name, tuple(calls), mismatches
        self.times: list[float] = []
        self.calls[-1]()

    def measure(self, repeats: int) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            for call in self.calls:
                call()
        end.record()
        end.synchronize()
        self.times.append(start.elapsed_time(end) * 1e3 / repeats / len(self.calls))


def rows_of_logits(rows: int) -> torch.Tensor:
    """[rows, VOCAB]: most in a bell, forty of each row far above it, as a model's are."""
    source = torch.Generator("cuda").manual_seed(0)
    logits = torch.empty((rows, VOCAB), device="cuda").normal_(std=2.5, generator=source)
    places = torch.randint(VOCAB, (rows, 40), device="cuda", generator=source)
    above = 8 + 3 * torch.empty((rows, 40), device="cuda").normal_(generator=source)
    return logits.scatter_add_(1, places, above)


class Case:
    """Logits and the parameters of one setting, in the dtypes that SGLang holds them in."""

    def __init__(self, setting: str, m: int):
        temperature, top_k, top_p, min_p = SETTINGS[setting]
        self.setting, self.m = setting, m
        self.logits = rows_of_logits(m)
        full = partial(torch.full, (m,), device="cuda")
        self.temperatures, self.top_ps, self.min_ps = map(full, (temperature, top_p, min_p))
        self.top_ks = full(top_k, dtype=torch.int32)
        self.seeds, self.positions = torch.arange(m, device="cuda") + 7, full(1000)
        count = copies(self.logits.numel() * 4)
        self.copies = [self.logits, *(self.logits.clone() for _ in range(count - 1))]
        self.probs = torch.empty_like(self.logits)

    def ours(self, logits: torch.Tensor, part: slice = slice(None)) -> torch.Tensor:
        names = ("temperatures", "top_ks", "top_ps", "min_ps", "seeds", "positions")
        return sample(logits[part], *(getattr(self, name)[part] for name in names))

    def upstream(self, logits: torch.Tensor) -> torch.Tensor:
        """As SGLang's Sampler with its default backend, but the logits stay what they are."""
        temperature, top_k, top_p, min_p = SETTINGS[self.setting]
        if top_k == 1:
            return torch.argmax(logits, -1)
        torch.div(logits, self.temperatures[:, None], out=self.probs)
        probs = self.probs
        probs[:] = torch.softmax(probs, dim=-1)
        if top_k == ALL and top_p == 1 and min_p == 0:
            return torch.multinomial(probs, num_samples=1).view(-1).to(torch.int32)
        from flashinfer.sampling import min_p_sampling_from_probs, top_k_top_p_sampling_from_probs

        if min_p == 0:
            given = probs, self.top_ks, self.top_ps
            return top_k_top_p_sampling_from_probs(*given, filter_apply_order="joint")
        from sgl_kernel import top_k_renorm_prob, top_p_renorm_prob

        probs = top_p_renorm_prob(top_k_renorm_prob(probs, self.top_ks), self.top_ps)
        return min_p_sampling_from_probs(probs, self.min_ps)

    def arm(self, name: str) -> Arm:
        run = self.ours if name.startswith("served") else self.upstream
        kind = EagerArm if name.endswith("eager") else Arm
        calls = [partial(run, logits) for logits in self.copies]
        return kind(name, calls, self.differs if run == self.ours else lambda: None)

    def differs(self) -> int:
        """Rows whose token is another one alone. Raises ValueError where greedy is no maximum."""
        whole = self.ours(self.logits)
        if self.setting == "greedy" and not (whole == torch.argmax(self.logits, -1)).all():
            raise ValueError("greedy: a token is not the first of the largest logits")
        alone = [self.ours(self.logits, slice(row, row + 1)) for row in range(self.m)]
        return int((torch.cat(alone) != whole).sum())


BOTH = ("upstream", "served")
ARMS = (*BOTH, *(f"{name} eager" for name in BOTH))


def measured(case: Case) -> dict[str, Any]:
    """All arms, in turn; where SGLang's cannot be captured, both count as they are without."""
    found = in_turn({name: partial(case.arm, name) for name in ARMS})
    if not set(BOTH) <= found["arms"].keys():
        for name in BOTH:
            found["arms"][name] = found["arms"][f"{name} eager"]
    return found


def line(entry: dict[str, Any]) -> str:
    """One line for people: the arms' times and their ratio."""
    times = {name: us for name, (us, _) in entry["arms"].items()}
    bad = [name for name, (_, count) in entry["arms"].items() if count]
    return (
        f"{entry['op']:18} M={entry['m']:4} | "
        f"{', '.join(f'{name} {us:.2f} us' for name, us in times.items())} | "
        f"x{times['upstream'] / times['served']:.3f} {entry['errors'] or ''}"
        f"{'| NOT BITWISE: ' + ', '.join(bad) if bad else ''}"
    )


def machine() -> dict[str, Any]:
    """`proof_cache.machine`, with the sources of our sampler and SGLang's packages."""
    folder = Path(kernels.__file__).parent
    paths = [*(folder / name for name in _SOURCES), *(folder / "cuda" / name for name in _CUDA)]
    text = b"".join(path.read_bytes() for path in paths)
    return proof_cache.machine() | upstream() | {"sources": hashlib.sha256(text).hexdigest()[:16]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", default="1,16,64,256")
    parser.add_argument("--only", default="", help="settings whose name holds this")
    parser.add_argument("--seconds", type=float, default=120)
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    file = CaseFile(args.out, {"machine": machine(), "bits": BITS}, ("op", "n", "m", "dtype"))
    for m in sorted(int(r) for r in args.rows.split(",")):
        for setting in SETTINGS:
            about = {"op": f"sample {setting}", "n": VOCAB, "k": 0, "dtype": "fp32", "tp": 1}
            entry = about | {"m": m}
            if args.only not in setting or entry in file or time.monotonic() > end:
                continue
            start = time.monotonic()
            case = Case(setting, m)
            entry |= measured(case)
            file.add(entry | {"seconds": round(time.monotonic() - start, 2)})
            sys.stdout.write(line(entry) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
