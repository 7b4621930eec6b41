"""Arguments that say which requests run when, and in how large pieces."""

from __future__ import annotations

from sgl_det.arguments import claimed, neutral, part_of, refused

_ORDER = "changes the order of requests, on which no row's bits depend"
_WAIT = "delays the admission of requests, on which no row's bits depend"
_DELAYER = "a setting of the prefill delayer, which only delays admission"
_POOL = "the size of the KV pool decides who waits, not what is computed"

SCHEDULE = {
    "mem_fraction_static": claimed(_POOL),
    "max_total_tokens": claimed(_POOL),
    "max_running_requests": claimed("bounds the decode batch, on which no row's bits depend"),
    "max_queued_requests": neutral("rejects requests when the queue is full"),
    "chunked_prefill_size": claimed(
        "chunks end at other places, which the backend's chunked_prefill claim covers"
    ),
    "enable_dynamic_chunking": refused(
        "chunk lengths then follow measured times, along a path that has not been reviewed"
    ),
    "enable_mixed_chunk": refused(
        "decode tokens run in the prefill kernel whenever a prefill is scheduled beside them"
    ),
    "max_prefill_tokens": claimed("bounds the prefill batch, on which no row's bits depend"),
    "prefill_max_requests": claimed("bounds the prefill batch, on which no row's bits depend"),
    "schedule_policy": claimed(_ORDER),
    "enable_priority_scheduling": claimed(
        "which request runs first; one that gives way is computed anew, as after a retraction"
    ),
    "disable_priority_preemption": claimed(_ORDER),
    "default_priority_value": claimed(_ORDER),
    "abort_on_priority_when_disabled": neutral("rejects requests that name a priority"),
    "schedule_low_priority_values_first": claimed(_ORDER),
    "priority_scheduling_preemption_threshold": claimed(_ORDER),
    "retraction_policy": claimed("which request is retracted when the KV pool is full"),
    "schedule_conservativeness": claimed("how early requests are admitted"),
    "disable_overlap_schedule": claimed("whether scheduling waits for the previous step"),
    "num_continuous_decode_steps": claimed("how often new requests are admitted"),
    "scheduler_recv_interval": neutral("how often the scheduler reads its socket"),
    "enable_prefill_delayer": claimed(_WAIT),
    "prefill_delayer_max_delay_passes": claimed(_DELAYER),
    "prefill_delayer_token_usage_low_watermark": claimed(_DELAYER),
    "prefill_delayer_forward_passes_buckets": neutral("buckets of a histogram"),
    "prefill_delayer_wait_seconds_buckets": neutral("buckets of a histogram"),
    "prefill_delayer_queue_min_ratio": claimed(_DELAYER),
    "prefill_delayer_max_delay_ms": claimed(_DELAYER),
    "min_free_slots_delay": claimed(_WAIT),
    # The process.
    "random_seed": claimed("a request without a seed takes a fixed one in deterministic mode"),
    "watchdog_timeout": neutral("ends a server that hangs"),
    "soft_watchdog_timeout": neutral("logs a server that hangs"),
    "sleep_on_idle": neutral("what an idle scheduler does"),
    "custom_sigquit_handler": neutral("what happens when a worker dies"),
    "numa_node": neutral("on which processor's memory the processes run"),
    "gc_threshold": neutral("when Python collects garbage"),
    # Two batches at once.
    "enable_two_batch_overlap": refused(
        "it splits a batch in two, along a path that has not been reviewed"
    ),
    "enable_single_batch_overlap": refused(
        "it overlaps the experts' communication, along a path that has not been reviewed"
    ),
    "tbo_token_distribution_threshold": part_of("enable_two_batch_overlap", "where to split"),
    "enable_pdmux": refused("it runs prefill and decode at once on parts of the GPU"),
    "pdmux_config_path": part_of("enable_pdmux", "how the GPU is divided"),
    "sm_group_num": part_of("enable_pdmux", "into how many parts the GPU is divided"),
}
