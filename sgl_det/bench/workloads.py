"""What is sent to the servers: sizes, arrivals and sampling of each workload, and the suites."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

BATCH, CACHED, LOAD = "batch", "cached", "load"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests of `prompt` tokens for `new` tokens each; sizes are in tokens.

    kind         batch: all in one HTTP request, so that they start together
                 cached: the same, with the prompts put into the prefix cache before, and the time
                 of the same request for one token taken off: decode alone
                 load: one HTTP request each, by SGLang's own benchmark client
    least_prompt, least_new  where they are given, lengths are uniform from these to prompt and new
    groups, shared  so many system prompts of so many tokens, each before an equal number of prompts
    of_capacity  Poisson arrivals at this part of the rate that normal reached; None: all at once
    stream       load: the answers are streamed, so that TTFT and ITL are measured
    rounds       that count; with warm_up another one goes before them
    about_s      of one arm on an H200, until it is measured
    ids          token ids are below it
    """

    many: int
    prompt: int
    new: int
    kind: str = BATCH
    least_prompt: int | None = None
    least_new: int | None = None
    groups: int = 0
    shared: int = 0
    of_capacity: float | None = None
    stream: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    rounds: int = 3
    warm_up: bool = True
    about_s: float = 2.0
    ids: int = 100_000

    def scaled(self, by: int) -> Workload:
        """A smaller one, for a machine without a GPU; equal for 1."""
        if by == 1:
            return self
        least = {"prompt": 8, "least_prompt": 8, "least_new": 1, "new": 1, "many": 1, "shared": 0}
        sizes = {n: getattr(self, n) for n in least}
        small = {n: max(least[n], -(-v // by)) for n, v in sizes.items() if v is not None}
        if self.groups:
            small["many"] = max(2 * self.groups, small["many"])
        return replace(self, **small, about_s=0.0, ids=256)

    def within(self, vocabulary: int) -> Workload:
        """The same with ids of a vocabulary of this size; beyond it a stock server may end."""
        return replace(self, ids=min(self.ids, vocabulary))

    @property
    def label(self) -> str:
        """Its sizes for people: requests x prompt/new, ranges as least-most."""
        prompt = _span(self.least_prompt, self.prompt)
        shared = f"{self.groups} of {self.shared} + " if self.groups else ""
        return f"{self.many} x {shared}{prompt}/{_span(self.least_new, self.new)}"


def _span(least: int | None, most: int) -> str:
    return str(most) if least is None else f"{least}-{most}"


def prompts(w: Workload, seed: object) -> list[tuple[list[int], int]]:
    """(token ids, new tokens) of each request; the seed decides them, for every arm alike."""
    rng = random.Random(str(seed))
    systems = [[rng.randrange(w.ids) for _ in range(w.shared)] for _ in range(w.groups)]
    found = []
    for i in range(w.many):
        length = rng.randint(w.least_prompt or w.prompt, w.prompt)
        ids = [rng.randrange(w.ids) for _ in range(length)]
        head = systems[i % w.groups] if systems else []
        found.append((head + ids, rng.randint(w.least_new or w.new, w.new)))
    return found


# The lengths of requests that arrive one by one; a saturating load of them gives the capacity.
_MIXED = {"prompt": 1024, "least_prompt": 256, "new": 256, "least_new": 128, "kind": LOAD}
_ONCE = {"warm_up": False, "kind": LOAD}
SATURATION = "saturation"
WORKLOADS = {
    "decode_bs1": Workload(many=1, prompt=128, new=256, about_s=1.4),
    "decode_bs16": Workload(many=16, prompt=128, new=256, about_s=1.5),
    "prefill_64x1024": Workload(many=64, prompt=1024, new=1, about_s=1.8),
    "throughput_256x1024": Workload(many=256, prompt=1024, new=1024, about_s=46.0, **_ONCE),
    "prefill_8x16384": Workload(many=8, prompt=16_384, new=1, about_s=4.6),
    "prefill_256x1024": Workload(many=256, prompt=1024, new=1, about_s=6.5),
    "decode_bs1_32k": Workload(many=1, prompt=32_768, new=256, kind=CACHED, about_s=3.0),
    "decode_bs4_32k": Workload(many=4, prompt=32_768, new=256, kind=CACHED, about_s=6.0),
    "sequences_1000": Workload(
        many=1000, prompt=100, new=110, least_new=90, about_s=20.0, rounds=3, **_ONCE
    ),
    "throughput_64x4096": Workload(many=64, prompt=4096, new=1024, about_s=35.0, **_ONCE),
    "throughput_16x16384": Workload(many=16, prompt=16_384, new=512, about_s=22.0, **_ONCE),
    SATURATION: Workload(many=400, about_s=16.0, rounds=1, warm_up=False, stream=True, **_MIXED),
    "poisson_50": Workload(
        many=600, of_capacity=0.5, stream=True, rounds=1, warm_up=False, about_s=48.0, **_MIXED
    ),
    "poisson_90": Workload(
        many=1000, of_capacity=0.9, stream=True, rounds=1, warm_up=False, about_s=45.0, **_MIXED
    ),
    "shared_prefix_chat": Workload(
        many=128, prompt=128, new=128, groups=8, shared=2048, about_s=5.0, stream=True, kind=LOAD
    ),
    "sampled_t1": Workload(
        many=128, prompt=512, new=256, temperature=1.0, top_p=0.95, about_s=7.0, kind=LOAD
    ),
}
QUICK = ("decode_bs1", "decode_bs16", "prefill_64x1024", "throughput_256x1024")
FULL = (*QUICK, *(n for n in WORKLOADS if n not in (*QUICK, "prefill_256x1024")))
SUITES = {"quick": QUICK, "full": FULL}
CPU_SCALE = 32  # by which the sizes are divided on a machine without a GPU
WARM_UP = Workload(many=32, prompt=512, new=16)


def chosen(names: Sequence[str], known: Mapping[str, Workload] = WORKLOADS) -> dict[str, Workload]:
    """The workloads of these names, in order; the saturating load goes before what is set by it.

    Raises ValueError for a name that is none.
    """
    if unknown := [n for n in names if n not in known]:
        raise ValueError(f"no workload is named {unknown[0]!r}; there are {', '.join(known)}")
    found: dict[str, Workload] = {}
    for name in names:
        if known[name].of_capacity:
            found.setdefault(SATURATION, known[SATURATION])
        found.setdefault(name, known[name])
    return found
