"""Axes on which the neighbours change: how many, which, where, when, how long."""

from __future__ import annotations

from sgl_det.axis import Axis
from sgl_det.probe.cases import Ask, Case, Context, Skip, batch_case, sampled

# Both sides of 8, 16 and 32, where row tiles and captured graphs change.
SIZES = (1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 64, 100)
QUICK_SIZES = (2, 7, 9, 17, 33)


def run_to_run(ctx: Context) -> list[Case]:
    """The same request again, alone and cold."""
    repeats = 2 if ctx.quick else 3
    return [
        batch_case(Axis.RUN_TO_RUN, f"again {i + 1}", [Ask(p)])
        for p in ctx.prompts.pool(3 if ctx.quick else 6)
        for i in range(repeats)
    ]


def batch_size(ctx: Context) -> list[Case]:
    """n different requests at once: n requests of one prompt, and one request of n prompts."""
    wanted = QUICK_SIZES if ctx.quick else SIZES
    sizes = [n for n in wanted if ctx.fits(ctx.prompts.pool(n))]
    if not sizes or max(sizes) < 2:
        raise Skip("the server holds no two requests at once")
    left_out = [n for n in wanted if n not in sizes]
    ctx.note(Axis.BATCH_SIZE, f"up to {max(sizes)} at once")
    if left_out:
        ctx.note(Axis.BATCH_SIZE, f"{', '.join(map(str, left_out))} do not fit the server")
    cases = []
    for i, n in enumerate(sizes):
        both = not ctx.quick and n <= 33
        if both or i % 2 == 0:
            asks = [Ask(p) for p in ctx.prompts.pool(n)]
            cases.append(batch_case(Axis.BATCH_SIZE, f"{n} at once", asks))
        if both or i % 2 == 1:
            asks = [Ask(p) for p in ctx.prompts.pool(n, with_texts=False)]
            cases.append(batch_case(Axis.BATCH_SIZE, f"list of {n}", asks, as_list=True))
    return cases


def batch_composition(ctx: Context) -> list[Case]:
    """One set of requests beside greedy, sampling, penalised and short-lived neighbours."""
    axis = Axis.BATCH_COMPOSITION
    mine = ctx.prompts.pool(3)
    pool = [p for p in ctx.prompts.pool(ctx.room(9 if ctx.quick else 17)) if p not in mine]
    if not pool:
        raise Skip("the server holds no two requests at once")
    penalty = {"frequency_penalty": 0.5, "presence_penalty": 0.3}
    biased = {"logit_bias": {"1": 2.0}}
    asks = [Ask(p) for p in mine]
    neighbours = {
        "greedy neighbours": [Ask(p) for p in pool],
        "one sampling neighbour": [sampled(pool[0], 0)],
        "sampling neighbours": [sampled(p, i) for i, p in enumerate(pool)],
        "greedy and sampling": [sampled(p, i) if i % 2 else Ask(p) for i, p in enumerate(pool)],
        "penalties": [Ask(p, penalty, {}, False) for p in pool[:4]],
        "logit bias": [Ask(p, biased, {}, False) for p in pool[:4]],
        "neighbours that end early": [
            Ask(p, {"max_new_tokens": 1 + i % 5}, {}, False) for i, p in enumerate(pool)
        ],
    }
    cases = [batch_case(axis, name, [*asks, *others]) for name, others in neighbours.items()]
    return cases + _among_tiny_prompts(ctx)


def _among_tiny_prompts(ctx: Context) -> list[Case]:
    """A longer prompt in one prefill with many prompts of one to three tokens.

    A kernel that takes its query tile from the mean prompt length takes another one here, and one
    of several key tiles is visible only where a prompt is longer than the tile.
    """
    # While the opener is computed the others arrive, so that one prefill holds them all.
    opener = ctx.prompts.random("few-opener", min(ctx.facts.max_input // 2, 300), 1)
    n = min(64, ctx.facts.max_running - 2, int(0.9 * ctx.facts.max_total) // 64)
    if n < 16:
        return []
    tiny = [Ask(ctx.prompts.random(f"few-{i}", 1 + i % 3, 2), compared=False) for i in range(n)]
    pool = sorted(ctx.prompts.pool(40, with_texts=False), key=lambda p: p.tokens)
    # A mean below 5 tokens and one below 17: two tiles.
    subjects = dict.fromkeys([p for p in pool if p.tokens <= limit][-1] for limit in (150, 600))
    cases = [
        batch_case(
            Axis.BATCH_COMPOSITION,
            f"{subject.tokens} tokens among {n} of 1 to 3",
            [Ask(opener, compared=False), *tiny[: n // 2], Ask(subject), *tiny[n // 2 :]],
            as_list=True,
        )
        for subject in subjects
    ]
    return [c for c in cases if ctx.fits([*c.needs, opener])]


def position_in_batch(ctx: Context) -> list[Case]:
    """The subject first, in the middle and last, in a list and by time of arrival."""
    axis = Axis.POSITION_IN_BATCH
    n = ctx.room(5 if ctx.quick else 9)
    if n < 3:
        raise Skip("the server holds no three requests at once")
    subject, *others = [Ask(p) for p in ctx.prompts.pool(n, with_texts=False)]
    cases = []
    for name, at in (("first", 0), ("middle", n // 2), ("last", n - 1)):
        order = [*others[:at], subject, *others[at:]]
        cases.append(batch_case(axis, f"{name} of a list of {n}", order, as_list=True))
        late = [Ask(a.prompt, delay=0.04 * i) for i, a in enumerate(order)]
        cases.append(batch_case(axis, f"{name} of {n} to arrive", late))
    return cases


def long_beside_short(ctx: Context) -> list[Case]:
    """A long prompt, and a long answer, beside short ones; all of them are compared."""
    axis = Axis.LONG_BESIDE_SHORT
    facts = ctx.facts
    cap = 9000 if facts.device != "cpu" else 400 if ctx.quick else 1500
    length = min(cap, facts.max_input - 64, facts.max_total // 4)
    if length < 200:
        raise Skip("the server takes no prompt of 200 tokens")
    long = ctx.prompts.random("long", length)
    long_answer = ctx.prompts.random("long-answer", 21, new_tokens=48 if ctx.quick else 128)
    short = [Ask(p) for p in ctx.prompts.pool(ctx.room(6))]
    cases = [
        batch_case(axis, "long prompt first", [Ask(long), *(_late(a, 0.1) for a in short)]),
        batch_case(axis, "long prompt joins", [*short, Ask(long, delay=0.4)]),
        batch_case(axis, "long answer", [Ask(long_answer), *(_late(a, 0.5) for a in short)]),
    ]
    return [c for c in cases if ctx.fits(c.needs)]


def arrival_order(ctx: Context) -> list[Case]:
    """The same requests in several orders and rhythms."""
    axis = Axis.ARRIVAL_ORDER
    pool = ctx.prompts.pool(ctx.room(6 if ctx.quick else 8))
    if len(pool) < 2:
        raise Skip("the server holds no two requests at once")
    mixed = pool[:]
    ctx.rng("order").shuffle(mixed)
    orders = {"forwards": pool, "backwards": pool[::-1], "shuffled": mixed}
    if ctx.quick:
        del orders["forwards"]
    steps = (0.1,) if ctx.quick else (0.02, 0.1, 0.3)
    cases = [
        batch_case(axis, f"{name}, {s:g} apart", [Ask(p, delay=i * s) for i, p in enumerate(order)])
        for name, order in orders.items()
        for s in steps
    ]
    subject, *others = pool
    joins = [Ask(subject, delay=0.5), *(Ask(p) for p in others)]
    leads = [Ask(subject), *(Ask(p, delay=0.5) for p in others)]
    return [
        *cases,
        batch_case(axis, "joins a running batch", joins),
        batch_case(axis, "is joined by a batch", leads),
    ]


def _late(ask: Ask, delay: float) -> Ask:
    return Ask(ask.prompt, ask.sampling, ask.extra, ask.compared, delay)
