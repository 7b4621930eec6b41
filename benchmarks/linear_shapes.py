"""The linear layers of the models that `bench_kernels.py` measures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

# hidden, inner, query heads, key heads, head_dim, vocabulary
MODELS = {
    "qwen3-0.6b": (1024, 3072, 16, 8, 128, 151936),
    "qwen3-8b": (4096, 12288, 32, 8, 128, 151936),
    "qwen3-32b": (5120, 25600, 64, 8, 128, 151936),
    "llama-3.1-8b": (4096, 14336, 32, 8, 128, 128256),
}
SHARDED = ("qwen3-8b", "qwen3-32b")
ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class Layer:
    """One weight [n, k]; models that share it share the measurement."""

    op: str
    n: int
    k: int
    tp: int


def layers(tp: int, models: tuple[str, ...] | None = None) -> Iterator[Layer]:
    """The layers of the models at one TP degree, each shape once."""
    seen = set()
    for model in models or (tuple(MODELS) if tp == 1 else SHARDED):
        hidden, inner, heads, kv_heads, dim, vocabulary = MODELS[model]
        kv = max(kv_heads // tp, 1)
        for op, n, k in (
            ("qkv", (heads // tp + 2 * kv) * dim, hidden),
            ("o", hidden, heads * dim // tp),
            ("gate_up", 2 * inner // tp, hidden),
            ("down", hidden, inner // tp),
            ("lm_head", vocabulary // tp, hidden),
        ):
            if (n, k) not in seen:
                seen.add((n, k))
                yield Layer(op, n, k, tp)
