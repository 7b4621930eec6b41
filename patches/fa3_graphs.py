"""Decode graphs of FA3 for contexts of more than one chunk, beside those for shorter ones.

Each graph is captured a second time, with chunks, and the host picks one by the lengths it knows.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from sgl_det.patch import Patch
from sgl_det.patches.fa3 import CHUNKED, more_chunks
from sgl_det.patches.table import patches_of

LONG = "sgl_det_chunks"


def _cuts(backend: Any) -> bool:
    """Whether a request can have more than one chunk."""
    from sgl_det.kernels.fa3_chunks import CHUNKS

    chunk = CHUNKS.get(getattr(backend, "head_dim", 0))
    return chunk is not None and backend.max_context_len > chunk


def _capture(original):
    @wraps(original)
    def capture_one_shape(self, size, forward, stream_idx=None, variant_label=None):
        if _cuts(self.attn_backend):
            if variant_label is not None:
                raise ValueError(f"graphs of the variant {variant_label} are not held")
            # First, since a replay refreshes what the capture after it left in the backend.
            setattr(self.attn_backend, CHUNKED, True)
            try:
                original(self, size, forward, stream_idx, LONG)
            finally:
                setattr(self.attn_backend, CHUNKED, False)
        return original(self, size, forward, stream_idx, variant_label)

    return capture_one_shape


def _more(runner: Any, forward_batch: Any) -> int | None:
    """Chunks beyond the first of each request, or None if the host does not know the lengths."""
    from sgl_det.kernels.fa3_chunks import CHUNKS, chunks_of

    if not _cuts(runner.attn_backend):
        return 0
    if forward_batch.seq_lens_cpu is None:
        return None
    chunk = CHUNKS[runner.attn_backend.head_dim]
    return sum(chunks_of(n, chunk) - 1 for n in forward_batch.seq_lens_cpu.tolist())


def _variant(original):
    @wraps(original)
    def _resolve_lora_variant(self, forward_batch):
        return original(self, forward_batch) if _more(self, forward_batch) == 0 else LONG

    return _resolve_lora_variant


def _fits(original):
    @wraps(original)
    def can_run_graph(self, forward_batch):
        more = _more(self, forward_batch)
        fits = more == 0 or (more is not None and more <= more_chunks(self.attn_backend))
        return fits and original(self, forward_batch)

    return can_run_graph


_RUNNER = "sglang.srt.model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner"
_TABLE = (
    (
        "capture",
        f"{_RUNNER}.capture_one_shape",
        "bab7bc7ab8a1",
        "a graph with chunks beside each without, so short contexts do no more work than before",
        _capture,
    ),
    (
        "variant",
        f"{_RUNNER}._resolve_lora_variant",
        "a5b1aa93b36e",
        "a batch takes the graph with chunks where one of its requests has more than one",
        _variant,
    ),
    (
        "fits",
        f"{_RUNNER}.can_run_graph",
        "677c14cc348e",
        "a batch of more chunks than a graph holds runs without one, in the same order",
        _fits,
    ),
)


def patches() -> tuple[Patch, ...]:
    """The patches of FA3's decode graphs."""
    return patches_of("fa3", _TABLE, "https://github.com/sgl-project/sglang/issues/22819")
