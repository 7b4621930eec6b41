"""The attention backends, as data: the arguments and patches of each, its claims and limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from sgl_det import patches
from sgl_det.axis import Axis
from sgl_det.patch import Patch

_NOT_REACHED = {
    Axis.SAMPLED: "the noise of a sampled request depends on flags of the whole batch in SGLang",
    Axis.STRUCTURED: "grammar masks have not been tested",
    Axis.PREEMPTION: "retraction has not been tested",
    Axis.CUDA_GRAPH: "graph and eager decode have not been compared",
    Axis.TP_SIZE: "tensor parallelism is refused",
}
_SCHEDULE = frozenset(
    {
        Axis.RUN_TO_RUN,
        Axis.BATCH_SIZE,
        Axis.BATCH_COMPOSITION,
        Axis.POSITION_IN_BATCH,
        Axis.LONG_BESIDE_SHORT,
        Axis.ARRIVAL_ORDER,
        Axis.STREAMING,
        Axis.LOGPROB_NEIGHBOUR,
        Axis.RESTART,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One attention backend.

    name          SGLang's own spelling
    server_args   what the launcher adds to SGLang's command line; shown to the user
    patches       the patches that a worker process applies for it
    claims        axes promised bitwise
    not_claimed   every other axis, with the reason
    head_dims     head sizes held, or None for any
    dtypes        model dtypes held
    windows       whether sliding windows are held
    split_tokens  KV tokens per split, part of the numerics key
    limits        sentences for the README's support table
    """

    name: str
    server_args: tuple[str, ...] = ("--enable-deterministic-inference",)
    patches: Callable[[], tuple[Patch, ...]]
    claims: frozenset[Axis]
    not_claimed: Mapping[Axis, str]
    head_dims: frozenset[int] | None = None
    dtypes: frozenset[str] = frozenset({"bfloat16", "float16"})
    windows: bool = False
    split_tokens: Mapping[str, int | None] = field(default_factory=dict)
    limits: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.claims | self.not_claimed.keys() != set(Axis) or self.claims & set(
            self.not_claimed
        ):
            raise ValueError(f"{self.name}: each axis must be claimed or not claimed, once")


_TILE = "the kernel's query tile follows the mean prompt length of the batch, below 17 tokens"
FLASHINFER = Backend(
    name="flashinfer",
    patches=lambda: patches.for_backend("flashinfer"),
    claims=frozenset({Axis.RUN_TO_RUN, Axis.RESTART}),
    not_claimed=MappingProxyType(
        {
            **_NOT_REACHED,
            **dict.fromkeys(_SCHEDULE - {Axis.RUN_TO_RUN, Axis.RESTART}, _TILE),
            Axis.CHUNKED_PREFILL: "the kernel's query tile follows the mean prompt length",
            Axis.PREFIX_CACHE: "SGLang switches the radix cache off for this backend",
            Axis.PREFILL_VS_DECODE: "prefill and decode use other tiles",
        }
    ),
    head_dims=frozenset({64, 128, 256}),
    split_tokens=MappingProxyType({"prefill": None, "decode": None}),
    limits=(
        "the radix cache is off",
        "prefill and decode bits differ",
        "batches whose prompts have 16 tokens or fewer on average take another tile",
    ),
)
FA3 = Backend(
    name="fa3",
    patches=lambda: patches.for_backend("fa3"),
    claims=_SCHEDULE | {Axis.CHUNKED_PREFILL, Axis.PREFIX_CACHE, Axis.PREFILL_VS_DECODE},
    not_claimed=MappingProxyType(_NOT_REACHED),
    head_dims=frozenset({128}),
    split_tokens=MappingProxyType({"prefill": None, "decode": None}),
    limits=("head_dim 128 only: smaller heads take a tile that depends on the neighbours",),
)
TRITON = Backend(
    name="triton",
    patches=lambda: patches.for_backend("triton"),
    claims=_SCHEDULE | {Axis.CHUNKED_PREFILL},
    not_claimed=MappingProxyType(
        {
            **_NOT_REACHED,
            Axis.PREFIX_CACHE: "a hit on tokens that were generated reuses decode's bits",
            Axis.PREFILL_VS_DECODE: "prefill and decode are two kernels",
        }
    ),
    head_dims=frozenset({64, 96, 128, 256}),
    split_tokens=MappingProxyType({"prefill": None, "decode": 256}),
    limits=("full attention only", "prefill and decode bits differ"),
)
TORCH_NATIVE = Backend(
    name="torch_native",
    server_args=(
        "--enable-deterministic-inference",
        "--device=cpu",
        "--attention-backend=torch_native",
    ),
    patches=lambda: patches.for_backend("torch_native"),
    claims=_SCHEDULE
    | {Axis.CHUNKED_PREFILL, Axis.PREFIX_CACHE, Axis.PREFILL_VS_DECODE, Axis.PREEMPTION},
    not_claimed=MappingProxyType(
        {axis: why for axis, why in _NOT_REACHED.items() if axis is not Axis.PREEMPTION}
    ),
    dtypes=frozenset({"bfloat16", "float16", "float32"}),
    limits=("machines without a GPU",),
)
BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {b.name: b for b in (FLASHINFER, FA3, TRITON, TORCH_NATIVE)}
)
