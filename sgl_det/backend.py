"""The attention backends, as data: the arguments and patches of each, its claims and limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from sgl_det import patches
from sgl_det.axis import Axis
from sgl_det.patch import Patch

_NOT_REACHED = {
    Axis.SAMPLED: "sampled requests have been compared on a CPU only",
    Axis.STRUCTURED: "constrained requests have been compared on a CPU only",
    Axis.CUDA_GRAPH: "graph and eager decode have not been compared",
    Axis.TP_SIZE: "tensor parallelism is refused",
}
_DRAWN = frozenset({Axis.SAMPLED, Axis.STRUCTURED})
_ON_A_CPU = {axis: why for axis, why in _NOT_REACHED.items() if axis not in _DRAWN}
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
    caps          whether capped logits of attention are held
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
    caps: bool = False
    split_tokens: Mapping[str, int | None] = field(default_factory=dict)
    limits: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.claims | self.not_claimed.keys() != set(Axis) or self.claims & set(
            self.not_claimed
        ):
            raise ValueError(f"{self.name}: each axis must be claimed or not claimed, once")


# What holds where prefill, chunks and decode take the keys in one order.
_ONE_ORDER = _SCHEDULE | {
    Axis.CHUNKED_PREFILL,
    Axis.PREFIX_CACHE,
    Axis.PREFILL_VS_DECODE,
    Axis.PREEMPTION,
}


def _split(tokens: int) -> Mapping[str, int | None]:
    return MappingProxyType({"prefill": tokens, "decode": tokens})


FLASHINFER = Backend(
    name="flashinfer",
    patches=lambda: patches.for_backend("flashinfer"),
    claims=_ONE_ORDER,
    not_claimed=MappingProxyType(_NOT_REACHED),
    head_dims=frozenset({64, 128, 256}),
    split_tokens=_split(512),
    limits=(
        "full attention only",
        "batches of requests of at most 512 tokens are prefilled by FlashInfer's FA2 kernel, "
        "built at the first start (some minutes) from headers with a few lines changed; longer "
        "ones and decode take our Triton kernels, which have the same bits",
    ),
)
FA3 = Backend(
    name="fa3",
    patches=lambda: patches.for_backend("fa3"),
    claims=_ONE_ORDER,
    not_claimed=MappingProxyType(_NOT_REACHED),
    head_dims=frozenset({64, 128}),
    split_tokens=_split(4096),
    limits=("full attention only", "Hopper only", "head sizes 64 and 128"),
)
TRITON = Backend(
    name="triton",
    patches=lambda: patches.for_backend("triton"),
    claims=_ONE_ORDER,
    not_claimed=MappingProxyType(_NOT_REACHED),
    head_dims=frozenset({64, 80, 96, 128, 256}),
    windows=True,
    caps=True,
    split_tokens=_split(512),
)
TORCH_NATIVE = Backend(
    name="torch_native",
    server_args=(
        "--enable-deterministic-inference",
        "--device=cpu",
        "--attention-backend=torch_native",
    ),
    patches=lambda: patches.for_backend("torch_native"),
    claims=_ONE_ORDER | _DRAWN,
    not_claimed=MappingProxyType(_ON_A_CPU),
    dtypes=frozenset({"bfloat16", "float16", "float32"}),
    limits=("machines without a GPU",),
)
BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {b.name: b for b in (FLASHINFER, FA3, TRITON, TORCH_NATIVE)}
)
