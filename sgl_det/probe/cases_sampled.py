"""Axes whose answers are drawn, or bound by a grammar: each has a seed, and an oracle of its own.

Whether a row samples, and how, is asked for by each request, and a sampler that looks at what the
whole batch asks for answers differently beside other kinds of neighbours. So each target meets one
kind of neighbours at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sgl_det.axis import Axis
from sgl_det.probe.cases import Ask, Case, Context, Skip, batch_case
from sgl_det.probe.prompts import Prompt

# Every parameter of sampling, alone and together.
SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 1.3, "top_k": 20},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "all": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
    "greedy": {"temperature": 0.0, "presence_penalty": 0.4},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "top_k 1": {"temperature": 1.0, "top_k": 1},
    "hot": {"temperature": 2.0},
    "penalties": {"temperature": 1.0, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    "repetition": {"temperature": 1.0, "repetition_penalty": 1.2, "top_k": 100},
    "bias": {"temperature": 1.0, "logit_bias": {"1": 2.0, "5": -3.0}},
    "min_new_tokens": {"temperature": 1.0, "min_new_tokens": 4, "ignore_eos": False},
}
FEW = 5  # of a quick probe
SEED = 1_000_003
_JSON = '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, '
_JSON += '"required": ["a", "b"]}'
GRAMMARS: dict[str, dict[str, Any]] = {
    "regex": {"regex": "[0-9]{3}-[a-f]{4}(, [0-9]{3}-[a-f]{4})*"},
    "schema": {"json_schema": _JSON},
    "ebnf": {"ebnf": 'root ::= item+\nitem ::= "[" [a-z]+ "=" [0-9]+ "]"'},
}
SIZES, QUICK_SIZES = (2, 9, 17, 33, 64), (9,)


def sampled(ctx: Context) -> list[Case]:
    """A seeded answer beside neighbours that sample in one way, or in every way."""
    axis = Axis.SAMPLED
    # Stock SGLang ends at a seeded request with min_p.
    found = {k: v for k, v in SAMPLED.items() if ctx.facts.claims is not None or "min_p" not in v}
    names = list(found)[:FEW] if ctx.quick else list(found)
    asks = [Ask(_seeded(ctx, "sampled", i, name, found[name])) for i, name in enumerate(names)]
    kinds = _neighbours(ctx)
    cases = [batch_case(axis, f"alone: {a.prompt.name}", [a]) for a in asks]
    for i, (kind, others) in enumerate(kinds.items()):
        # A quick probe shows each kind to two targets, in turn.
        mine = [asks[(i + j) % len(asks)] for j in range(2)] if ctx.quick else asks
        cases += [batch_case(axis, f"{kind}: {a.prompt.name}", [*others, a]) for a in mine]
    for n in QUICK_SIZES if ctx.quick else SIZES:
        crowd = [asks[i % len(asks)] for i in range(min(n, len(asks)))]
        crowd += _sampling(ctx, n - len(crowd))
        if len(crowd) == n and ctx.fits([a.prompt for a in crowd]):
            cases.append(batch_case(axis, f"{n} at once", crowd))
            cases.append(batch_case(axis, f"list of {n}", crowd, as_list=True))
            cases.append(batch_case(axis, f"{n}, one by one", _one_by_one(crowd, 0.05)))
    return [c for c in cases if ctx.fits(c.needs)]


def structured(ctx: Context) -> list[Case]:
    """Answers bound by a grammar, greedy and drawn, beside each other and beside free ones."""
    axis = Axis.STRUCTURED
    if not ctx.facts.grammar:
        raise Skip("the server has no grammar backend, or none for its device")
    bound = []
    for i, (name, grammar) in enumerate(GRAMMARS.items()):
        for j, drawn in enumerate(({}, {"temperature": 1.0, "top_p": 0.95})):
            given = grammar | drawn | {"ignore_eos": False}
            label = f"{name}{', drawn' if drawn else ''}"
            bound.append(Ask(_seeded(ctx, "structured", 2 * i + j, label, given)))
    free = [Ask(p) for p in _short(ctx, ctx.room(6) - 1)]
    drawn = _sampling(ctx, min(4, ctx.room(4)))
    cases = [batch_case(axis, f"alone: {a.prompt.name}", [a]) for a in bound]
    groups = {"beside free ones": free, "beside drawn ones": drawn, "beside each other": []}
    for name, others in groups.items():
        together = [*bound, *others]
        cases.append(batch_case(axis, name, together))
        cases.append(batch_case(axis, f"{name}, one by one", _one_by_one(together, 0.1)))
    if not ctx.quick:
        for name, others in groups.items():
            alone = [(f"alone {name}: {a.prompt.name}", [a, *others]) for a in bound if others]
            cases += [batch_case(axis, what, asks) for what, asks in alone]
    return [c for c in cases if ctx.fits(c.needs)]


def _one_by_one(asks: Sequence[Ask], step: float) -> list[Ask]:
    return [replace(a, delay=step * i) for i, a in enumerate(asks)]


def _short(ctx: Context, n: int) -> list[Prompt]:
    """n prompts without the subject, whose answer is long."""
    return ctx.prompts.pool(n + 1, with_texts=False)[1:]


def _seeded(ctx: Context, stem: str, i: int, label: str, given: dict[str, Any]) -> Prompt:
    prompt = ctx.prompts.random(f"{stem}-{i}", 9 + 7 * i)
    return prompt.with_sampling(f"{stem} {label}", **given, sampling_seed=SEED + i)


def _sampling(ctx: Context, n: int) -> list[Ask]:
    """n neighbours, not compared, that sample in every way in turn."""
    ways = [v for k, v in SAMPLED.items() if "min_p" not in v]
    pool = _short(ctx, n) if n > 0 else []
    return [
        Ask(p, ways[i % len(ways)] | {"sampling_seed": 7 * i}, {}, False)
        for i, p in enumerate(pool)
    ]


def _neighbours(ctx: Context) -> dict[str, list[Ask]]:
    """Kinds of neighbours, not compared."""
    n = ctx.room(5 if ctx.quick else 9) - 2
    if n < 1:
        raise Skip("the server holds no two requests at once")
    pool = _short(ctx, n)

    def all_with(extra: dict[str, Any] | None = None, **sampling: Any) -> list[Ask]:
        return [Ask(p, sampling, extra or {}, False) for p in pool]

    hot, every = {"temperature": 1.0}, {"logprob_start_len": 0, "top_logprobs_num": 20}
    found = {
        "one greedy": all_with()[:1],
        "greedy": all_with(),
        "top_p": all_with(**hot, top_p=0.8),
        "top_k": all_with(**hot, top_k=10),
        "unfiltered": all_with(**hot),
        "every way": _sampling(ctx, n),
        "penalties": all_with(frequency_penalty=0.5, repetition_penalty=1.1),
        "all log-probabilities": all_with(every),
        "ending early": [
            Ask(p, hot | {"max_new_tokens": 1 + i}, {}, False) for i, p in enumerate(pool)
        ],
    }
    if ctx.facts.grammar:
        found["a grammar"] = all_with(**hot, **GRAMMARS["regex"], ignore_eos=False)
    if ctx.facts.claims is not None:
        found["min_p"] = all_with(**hot, min_p=0.1)
    return found
