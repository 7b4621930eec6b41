"""How a workload is sent, and what is measured: one HTTP request, or SGLang's benchmark client.

Of ``sglang.benchmark.serving`` three parts are used: its Poisson arrivals, its request function and
its metrics. Its prompts are not: ours are token ids that follow from a seed, so that every arm gets
the same ones, and no tokenizer is needed.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.machinery
import importlib.util
import json
import sys
import time
from argparse import Namespace
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import requests

from sgl_det.bench import stats
from sgl_det.bench.workloads import Workload, prompts

TIMEOUT_S = 900


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One round of a workload on one arm. Every figure of `metrics` is better where it is less.

    metrics    seconds, but for Poisson arrivals; streamed also ttft_p50_ms, ttft_p99_ms,
               itl_p50_ms, itl_p99_ms
    cached     the fewest tokens that a prompt had in the prefix cache; None: not told
    quantiles  ttft_ms and itl_ms at the percentiles of `stats.QUANTILES`
    """

    metrics: dict[str, float]
    cached: int | None = None
    quantiles: dict[str, list[float]] = field(default_factory=dict)


def flush(url: str) -> None:
    """Empty a server's prefix cache."""
    requests.post(f"{url}/flush_cache?timeout=20", timeout=60).raise_for_status()


def send_batch(url: str, w: Workload, seed: object, new: int | None = None) -> Sample:
    """A workload in one request; new is another number of new tokens.

    Raises requests.HTTPError where the server refuses.
    """
    made = prompts(w, seed)
    params = [_sampling(w, new or length) for _, length in made]
    body = {"input_ids": [ids for ids, _ in made], "sampling_params": params}
    text, kind = json.dumps(body), {"Content-Type": "application/json"}
    begun = time.perf_counter()
    reply = requests.post(f"{url}/generate", data=text, headers=kind, timeout=TIMEOUT_S)
    seconds = time.perf_counter() - begun
    reply.raise_for_status()
    cached = min(r["meta_info"]["cached_tokens"] for r in reply.json())
    return Sample(metrics={"seconds": seconds}, cached=cached)


def _sampling(w: Workload, new: int) -> dict[str, Any]:
    return {
        "temperature": w.temperature,
        "top_p": w.top_p,
        "max_new_tokens": new,
        "ignore_eos": True,
    }


def sglang_client() -> ModuleType:
    """``sglang.benchmark.serving``. It imports all its data sets, of which one needs `datasets`."""
    lacking = "datasets" not in sys.modules and importlib.util.find_spec("datasets") is None
    if lacking:
        empty = ModuleType("datasets")
        empty.__spec__ = importlib.machinery.ModuleSpec("datasets", None)
        empty.load_dataset = None
        sys.modules["datasets"] = empty
    try:
        return importlib.import_module("sglang.benchmark.serving")
    finally:
        if lacking:
            sys.modules.pop("datasets", None)


def send_load(url: str, w: Workload, seed: object, rate: float | None = None) -> Sample:
    """A request each, by SGLang's client: at once, or as Poisson arrivals at rate requests/s.

    Raises RuntimeError where a request fails, or a stream shows no token.
    """
    import numpy as np

    serving = sglang_client()
    settings = Namespace(
        temperature=w.temperature,
        top_p=w.top_p,
        disable_ignore_eos=False,
        disable_stream=not w.stream,
        return_logprob=False,
        return_routed_experts=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        cache_report=True,
        header=None,
    )
    serving.set_global_args(settings)
    rows = [
        serving.DatasetRow(prompt=ids, prompt_len=len(ids), output_len=new)
        for ids, new in prompts(w, seed)
    ]
    np.random.seed(len(rows))  # the client draws its arrivals there: for every arm the same
    outputs, seconds = asyncio.run(_drive(serving, f"{url}/generate", rows, rate or float("inf")))
    failed = [o.error for o in outputs if not o.success]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(rows)} requests failed: {failed[0][:300]}")
    sample = _sample(serving, rows, outputs, seconds, w.stream)
    if rate:  # the arrivals decide how long it takes
        del sample.metrics["seconds"]
    return sample


async def _drive(serving: ModuleType, url: str, rows: list, rate: float) -> tuple[list, float]:
    begun = time.perf_counter()
    tasks = []
    async for row in serving.get_request(rows, rate):
        request = serving.RequestFuncInput(
            model="",
            prompt=row.prompt,
            api_url=url,
            prompt_len=row.prompt_len,
            output_len=row.output_len,
            lora_name=None,
            image_data=None,
            extra_request_body={},
        )
        tasks.append(asyncio.create_task(serving.async_request_sglang_generate(request)))
    outputs = await asyncio.gather(*tasks)
    return outputs, time.perf_counter() - begun


def _sample(
    serving: ModuleType, rows: list, outputs: list, seconds: float, streamed: bool
) -> Sample:
    cached = min(o.cached_tokens for o in outputs)
    if not streamed:
        return Sample(metrics={"seconds": seconds}, cached=cached)
    silent = sum(o.ttft == 0.0 for o in outputs)
    if silent:
        raise RuntimeError(f"{silent} of {len(rows)} streams showed no text")
    nothing = SimpleNamespace(encode=lambda text, add_special_tokens=False: [])
    m, _ = serving.calculate_metrics(rows, outputs, seconds, nothing, "sglang")
    metrics = {"seconds": seconds, "ttft_p50_ms": m.median_ttft_ms, "ttft_p99_ms": m.p99_ttft_ms}
    metrics |= {"itl_p50_ms": m.median_itl_ms, "itl_p99_ms": m.p99_itl_ms}
    gaps = [1000 * gap for o in outputs for gap in o.itl]
    quantiles = {"ttft_ms": stats.quantiles([1000 * o.ttft for o in outputs])}
    quantiles |= {"itl_ms": stats.quantiles(gaps)} if gaps else {}
    return Sample(
        metrics={n: float(v) for n, v in metrics.items()}, cached=cached, quantiles=quantiles
    )
