"""Prompts and generations that cross the sizes at which the attention's order has its seams.

An edge is a number of tokens: of a KV tile, of a KV split, of two, of a prefill chunk. A kernel
whose tiles or splits do not lie at absolute positions, or whose decode step divides them otherwise
than its prefill, shows it where a length passes an edge by -1, 0 and +1.
"""

from __future__ import annotations

from sgl_det.axis import Axis
from sgl_det.probe.cases import Ask, Case, Context, Seen, batch_case
from sgl_det.probe.cases_prefill import continued, cut, holds, reads_decoded, rescored, warmed
from sgl_det.probe.prompts import Prompt
from sgl_det.probe.replies import native_answer

TILES = (64, 128)
AROUND = (-1, 0, 1)
BEFORE, NEW_TOKENS = 3, 8  # a prompt ends 3 tokens before its edge, its answer 5 behind it
BEHIND = 17  # how far a prompt that is cut reaches behind its edge
NEW_TEXT = 13  # of a chat's second turn
ROOM = 64  # more than any prompt or generation here reaches behind its edge
CHUNK_SLOT = 15  # the chunk's number: the other edges keep theirs under any chunk size
CPU_LONGEST, QUICK_CPU_LONGEST = 1500, 200
LONG = 8192
MANY_SHORT = 40


def cases(ctx: Context, axis: Axis) -> list[Case]:
    """The cases of an axis at the edges that the server's limits allow; none on other axes."""
    make = {
        Axis.LONG_BESIDE_SHORT: _long_beside_many_short,
        Axis.CHUNKED_PREFILL: _cut_by_chunks,
        Axis.PREFIX_CACHE: _prefixes,
        Axis.PREFILL_VS_DECODE: _across,
    }
    return make[axis](ctx) if axis in make else []


def edges(ctx: Context) -> dict[int, int]:
    """The edges, and for each the number that its prompts carry in their names.

    All that leave room in the server's context, or in a quick probe the larger tile and one more;
    on a CPU none that takes long.
    """
    facts = ctx.facts
    chunk = facts.chunk or 0
    sizes = [*TILES, *facts.splits, *(2 * n for n in facts.splits)]
    numbers = {size: i for i, size in enumerate(dict.fromkeys(sizes))}
    numbers.setdefault(chunk, CHUNK_SLOT)
    if ctx.quick:
        few = (TILES[-1], *(facts.splits[:1] or (chunk,)))
        numbers = {edge: i for edge, i in numbers.items() if edge in few}
    longest = min(facts.max_input, int(0.9 * facts.max_total))
    if facts.device == "cpu":
        longest = min(longest, QUICK_CPU_LONGEST if ctx.quick else CPU_LONGEST)
    return {edge: i for edge, i in sorted(numbers.items()) if BEFORE < edge <= longest - ROOM}


def _across(ctx: Context) -> list[Case]:
    """Generations that cross an edge: rescored, and gone on with by prefill and from the cache."""
    axis, found = Axis.PREFILL_VS_DECODE, []
    prompts = _prompts(ctx)
    for edge, p in prompts.items():
        found.append(Case(axis, f"rescored across {edge}", (p,), rescored([p])))
        for d in AROUND:
            # A prompt of edge + d tokens, and one of which edge + d come from the cache.
            cold, warm = BEFORE + d, BEFORE + d + 1
            if not ctx.quick:
                run = continued(p, cold, warm=False)
                found.append(Case(axis, f"{edge + d} tokens prefilled", (p,), run))
            if reads_decoded(ctx, p, warm) and (d == 0 or not ctx.quick):
                run = continued(p, warm, warm=True)
                found.append(Case(axis, f"{edge + d} tokens in the cache", (p,), run))
    together = tuple(prompts.values())
    if not ctx.quick and len(together) > 1 and holds(ctx, together, 0):
        run = rescored(list(together))
        found.append(Case(axis, "rescored across edges, together", together, run))
    return found


def _prefixes(ctx: Context) -> list[Case]:
    """Hits that end beside an edge, and the second turn of a chat whose first crossed it."""
    axis, found = Axis.PREFIX_CACHE, []
    several = list(edges(ctx).items())
    for edge, i in several[-1:] if ctx.quick else several:
        p = ctx.prompts.random(f"edge-prefix-{i}", edge + BEHIND, NEW_TOKENS)
        for d in AROUND:
            found.append(warmed(axis, f"first {edge + d} warm", [cut(ctx, p, edge + d)], [p]))
    found = [c for c in found if ctx.fits(c.needs)]
    firsts = list(_prompts(ctx).values())
    subject = ctx.prompts.subject
    if not ctx.quick and subject.tokens + subject.new_tokens + ROOM <= ctx.facts.max_input:
        firsts.append(subject)
    for p in firsts:
        if reads_decoded(ctx, p, p.new_tokens):
            name = f"turn 2 after {p.tokens} and {p.new_tokens} generated"
            found.append(Case(axis, name, (p,), _turn_2(p)))
    return found


def _cut_by_chunks(ctx: Context) -> list[Case]:
    """Prompts of which a chunk ends beside an edge, because a neighbour has the rest of it."""
    axis, chunk = Axis.CHUNKED_PREFILL, ctx.facts.chunk
    make = ctx.prompts.random
    longest = ctx.facts.max_input - ROOM
    if ctx.quick or chunk > longest:
        return []
    # The first chunk goes to a prompt of its own, so that what follows is queued and then shares.
    first = Ask(make("chunk-first", chunk, NEW_TOKENS), compared=False)
    found = []
    for edge, i in edges(ctx).items():
        p = make(f"edge-cut-{i}", edge + BEHIND, NEW_TOKENS)
        for d in AROUND:
            filler = Ask(
                make("chunk-filler", chunk - (edge + d) % chunk, NEW_TOKENS), {}, {}, False
            )
            name = f"a chunk ends at {edge + d}"
            found.append(batch_case(axis, name, [first, filler, Ask(p)], as_list=True))
    return [c for c in found if holds(ctx, c.needs, 2 * chunk)]


def _long_beside_many_short(ctx: Context) -> list[Case]:
    """One prompt of about 8k tokens beside many short ones, and prompts at every edge at once."""
    axis, facts = Axis.LONG_BESIDE_SHORT, ctx.facts
    if facts.device == "cpu" and ctx.quick:
        return []
    most = facts.max_total // 2 if facts.device != "cpu" else CPU_LONGEST
    long = ctx.prompts.random("edge-long", min(LONG, facts.max_input - ROOM, most), NEW_TOKENS)
    n = ctx.room(16 if ctx.quick else MANY_SHORT)
    while n > 1 and not ctx.fits([long, *ctx.prompts.pool(n)]):
        n -= 1
    short = [Ask(p) for p in ctx.prompts.pool(n)]
    both = [Ask(long), *short]
    found = [batch_case(axis, f"one of {long.tokens} beside {n}", both)]
    if not ctx.quick:
        found.append(batch_case(axis, f"one of {long.tokens} joins {n}", [*short, _late(long)]))
        at_edges = [Ask(p) for p in _prompts(ctx).values()]
        found.append(batch_case(axis, "generations across every edge", [*at_edges, *short[:6]]))
    return [c for c in found if ctx.fits(c.needs)]


def _prompts(ctx: Context) -> dict[int, Prompt]:
    """For each edge the prompt whose answer crosses it, where it fits the server."""
    made = {
        edge: ctx.prompts.random(f"edge-{i}", edge - BEFORE, NEW_TOKENS)
        for edge, i in edges(ctx).items()
    }
    return {edge: p for edge, p in made.items() if ctx.fits([p])}


def _late(prompt: Prompt) -> Ask:
    return Ask(prompt, delay=0.4)


def _turn_2(first: Prompt):
    """A chat's second turn, prompt, answer and new text: on KV that decode wrote, against cold."""

    async def run(ctx: Context) -> list[Seen]:
        rng = ctx.rng(f"{first.name}:turn 2")
        text = tuple(rng.randrange(ctx.facts.vocab_size) for _ in range(NEW_TEXT))
        ids = first.ids + ctx.oracles[first].tokens + text
        second = Ask(Prompt(f"{first.name}-turn2", ids, None, len(ids), NEW_TOKENS))
        cold = native_answer(await ctx.server.generate(second.body()))
        await ctx.server.flush()
        await ctx.one(Ask(first))
        warm = native_answer(await ctx.server.generate(second.body()))
        if warm.cached <= first.tokens:
            ctx.note(Axis.PREFIX_CACHE, "turn 1's answer was not read from the cache")
            return []
        return [Seen(second.prompt.name, warm, cold)]

    return run
