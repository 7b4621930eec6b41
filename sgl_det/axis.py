"""The axes along which a request's surroundings can change while its answer must not."""

from __future__ import annotations

from enum import StrEnum


class Axis(StrEnum):
    """One way in which the server's state may differ between two answers to one request."""

    RUN_TO_RUN = "run_to_run"
    BATCH_SIZE = "batch_size"
    BATCH_COMPOSITION = "batch_composition"
    POSITION_IN_BATCH = "position_in_batch"
    LONG_BESIDE_SHORT = "long_beside_short"
    ARRIVAL_ORDER = "arrival_order"
    CHUNKED_PREFILL = "chunked_prefill"
    PREFIX_CACHE = "prefix_cache"
    PREFILL_VS_DECODE = "prefill_vs_decode"
    STREAMING = "streaming"
    LOGPROB_NEIGHBOUR = "logprob_neighbour"
    RESTART = "restart"
    CUDA_GRAPH = "cuda_graph"
    PREEMPTION = "preemption"
    SAMPLED = "sampled"
    STRUCTURED = "structured"
    TP_SIZE = "tp_size"
