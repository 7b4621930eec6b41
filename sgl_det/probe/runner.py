"""Runs the cases of the chosen axes against one server and writes the report."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain, zip_longest

from tqdm import tqdm

from sgl_det.axis import Axis
from sgl_det.probe import cases_api, cases_batch, cases_edges, cases_prefill, cases_sampled
from sgl_det.probe.cases import Case, Context, Skip
from sgl_det.probe.client import Facts, ProbeError, Server
from sgl_det.probe.prompts import NEW_TOKENS, QUICK_NEW_TOKENS, Prompts, texts
from sgl_det.probe.table import AxisResult, Distinct, Report, Tally

DRIVEN: dict[Axis, Callable[[Context], list[Case]]] = {
    Axis.RUN_TO_RUN: cases_batch.run_to_run,
    Axis.BATCH_SIZE: cases_batch.batch_size,
    Axis.BATCH_COMPOSITION: cases_batch.batch_composition,
    Axis.POSITION_IN_BATCH: cases_batch.position_in_batch,
    Axis.LONG_BESIDE_SHORT: cases_batch.long_beside_short,
    Axis.ARRIVAL_ORDER: cases_batch.arrival_order,
    Axis.CHUNKED_PREFILL: cases_prefill.chunked_prefill,
    Axis.PREFIX_CACHE: cases_prefill.prefix_cache,
    Axis.PREFILL_VS_DECODE: cases_prefill.prefill_vs_decode,
    Axis.STREAMING: cases_api.streaming,
    Axis.LOGPROB_NEIGHBOUR: cases_api.logprob_neighbour,
    Axis.SAMPLED: cases_sampled.sampled,
    Axis.STRUCTURED: cases_sampled.structured,
}
# Why the others are not: a client cannot bring them about, or cannot see that it did.
OUT_OF_REACH: dict[Axis, str] = {
    Axis.RESTART: "compare two reports: --compare",
    Axis.CUDA_GRAPH: "compare a server with --disable-cuda-graph: --compare",
    Axis.PREEMPTION: "a client cannot bring it about",
    Axis.TP_SIZE: "compare two reports: --compare",
}


async def probe(
    url: str,
    *,
    api_key: str | None = None,
    axes: Iterable[str] | None = None,
    quick: bool = False,
    seed: int = 0,
    progress: bool = True,
    timeout_s: float = 300.0,
    limit_s: float | None = None,
) -> Report:
    """Drive a running SGLang server through the axes that a client can reach.

    The oracle of each prompt is its answer with a cold cache and nobody else; everything else is
    compared with it as bits. The server should have no other users: the cache is emptied between
    cases. axes: names of `DRIVEN`, all by default. timeout_s bounds each request, limit_s the whole
    probe: the axes then take turns, and the notes tell how many cases of each were left out.
    Raises ProbeError, with one sentence, when the server cannot be probed to the end, and
    ValueError for an axis that the probe does not drive.
    """
    chosen = _chosen(axes)
    start = time.perf_counter()
    async with Server(url, api_key, timeout_s) as server:
        facts = await server.discover()
        known = [(text, await server.tokenize(text)) for text in texts(seed)]
        prompts = Prompts(facts, seed, known, QUICK_NEW_TOKENS if quick else NEW_TOKENS)
        ctx = Context(server, facts, prompts, quick, seed)
        facts.recorded["edges"] = list(cases_edges.edges(ctx))
        if facts.device == "cpu":
            await server.quicken_flush()
        tallies = {axis: Tally(axis) for axis in Axis}
        cases = _plan(ctx, chosen, tallies)
        with tqdm(disable=not progress, unit="", leave=False, mininterval=0.5) as bar:
            await _run(ctx, cases, tallies, bar, None if limit_s is None else start + limit_s)
        await server.flush()
    for axis, note in ctx.notes.items():
        tallies[axis].note = tallies[axis].note or note
    return _report(ctx, chosen, tallies, url, time.perf_counter() - start)


def run_probe(url: str, **kwargs) -> Report:
    """`probe` for callers without an event loop."""
    return asyncio.run(probe(url, **kwargs))


def _chosen(axes: Iterable[str] | None) -> list[Axis]:
    if axes is None:
        return list(DRIVEN)
    unknown = [a for a in axes if a not in set(DRIVEN)]
    if unknown:
        raise ValueError(
            f"the probe does not drive the axis {unknown[0]!r}; it drives {', '.join(DRIVEN)}"
        )
    return [a for a in DRIVEN if a in set(axes)]


def _plan(ctx: Context, chosen: list[Axis], tallies: dict[Axis, Tally]) -> list[Case]:
    cases: list[Case] = []
    for axis in chosen:
        try:
            planned = [*DRIVEN[axis](ctx), *cases_edges.cases(ctx, axis)]
            if not planned:
                raise Skip("no case fits the server's limits")
            cases += planned
        except Skip as reason:
            tallies[axis].note, tallies[axis].excused = str(reason), True
    return cases


async def _run(
    ctx: Context,
    cases: list[Case],
    tallies: dict[Axis, Tally],
    bar: tqdm,
    deadline: float | None,
) -> None:
    """Measure the oracles and run the cases, as many as begin before the deadline."""
    left = Counter()
    if deadline is not None:
        cases = _in_turns(cases)
    over = (lambda: False) if deadline is None else (lambda: time.perf_counter() > deadline)
    needed = dict.fromkeys(p for c in cases for p in c.needs)
    bar.reset(total=len(needed) + len(cases))
    for prompt in needed:
        if over():
            break
        bar.set_description("oracles", refresh=False)
        ctx.server.doing = f"measuring the oracle of {prompt.name}"
        await ctx.measure(prompt)
        bar.update()
    for case in cases:
        if over():
            left[case.axis] += 1
            continue
        bar.set_description(str(case.axis), refresh=False)
        ctx.server.doing = f"on {case.axis}, case {case.name!r}"
        tally, start = tallies[case.axis], time.perf_counter()
        await ctx.server.flush()
        seen = await case.run(ctx)
        tally.seconds += time.perf_counter() - start
        tally.cases += bool(seen)
        for s in seen:
            tally.see(case.name, s.request, s.expected, s.answer)
        bar.update()
    for axis, n in left.items():
        ctx.note(axis, f"{n} cases left out, the time was over")


def _in_turns(cases: list[Case]) -> list[Case]:
    """The same cases, one of each axis after the other."""
    by: dict[Axis, list[Case]] = {}
    for case in cases:
        by.setdefault(case.axis, []).append(case)
    return [case for case in chain(*zip_longest(*by.values())) if case is not None]


def _report(
    ctx: Context, chosen: list[Axis], tallies: dict[Axis, Tally], url: str, seconds: float
) -> Report:
    facts = ctx.facts
    answers = {
        p.name: {"prompt": p.digest(), "tokens": list(a.tokens), "logprobs": list(a.logprobs)}
        for p, a in ctx.oracles.items()
    }
    everything = Distinct()
    for tally in tallies.values():
        everything.merge(tally.distinct)
    name = ctx.prompts.subject.name
    return Report(
        url=url,
        key=ctx.server.key or facts.key,
        seed=ctx.seed,
        quick=ctx.quick,
        seconds=round(seconds, 1),
        server=facts.recorded,
        rows=tuple(_row(t, facts, chosen) for t in tallies.values()),
        answers=answers,
        subject={
            "conditions": everything.answers.get(name, 0),
            "unique_tokens": len(everything.tokens.get(name, ())),
            "unique_logprobs": len(everything.logprobs.get(name, ())),
        },
        total={
            "prompts": len(everything.answers),
            "answers": sum(everything.answers.values()),
            "unique_tokens": sum(map(len, everything.tokens.values())),
            "unique_logprobs": sum(map(len, everything.logprobs.values())),
        },
    )


def _row(tally: Tally, facts: Facts, chosen: list[Axis]) -> AxisResult:
    if tally.axis not in chosen:
        tally.note = OUT_OF_REACH.get(tally.axis, "not chosen")
    reason = facts.not_claimed.get(str(tally.axis), "")
    return tally.result(facts.claims, driven=tally.axis in chosen, reason=reason)


__all__ = ["DRIVEN", "OUT_OF_REACH", "ProbeError", "probe", "run_probe"]
