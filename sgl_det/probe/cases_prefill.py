"""Axes on which a position's origin changes: which chunk, the prefix cache, or decode."""

from __future__ import annotations

from sgl_det.axis import Axis
from sgl_det.probe.cases import Ask, Case, Context, Seen, Skip, batch_case
from sgl_det.probe.compare import Answer, hex_bits
from sgl_det.probe.prompts import Prompt
from sgl_det.probe.replies import native_answer, top_entries

CHUNK_NEW_TOKENS = 8


def chunked_prefill(ctx: Context) -> list[Case]:
    """Prompts around the chunk size, cut at other places because others use up the chunk first."""
    axis, facts = Axis.CHUNKED_PREFILL, ctx.facts
    chunk = facts.chunk
    if chunk is None:
        raise Skip("chunked prefill is off")
    longest = facts.max_input - CHUNK_NEW_TOKENS
    lengths = [chunk - 1, chunk + 1] if ctx.quick else [chunk - 1, chunk, chunk + 1, 2 * chunk + 1]
    lengths = [n for n in lengths if 1 <= n <= longest]
    # A model whose context is shorter than the chunk is cut only where several prompts share it.
    lengths = lengths or [longest] * (chunk // longest + 2)
    make = ctx.prompts.random
    prompts = [make(f"chunk-{i}", n, CHUNK_NEW_TOKENS) for i, n in enumerate(lengths)]
    # The first chunk goes to a prompt of its own, so that what follows is queued and then shares.
    first = Ask(make("chunk-first", min(chunk, longest), CHUNK_NEW_TOKENS), compared=False)
    fillers = [chunk // 2 + 1] if ctx.quick else [chunk // 3, chunk // 2 + 1, chunk - 1]
    cases = [batch_case(axis, "all at once", [Ask(p) for p in prompts], as_list=True)]
    cases += [batch_case(axis, "after a full chunk", [first, *map(Ask, prompts)], as_list=True)]
    for n in fillers:
        filler = Ask(
            make("chunk-filler", max(1, min(n, longest)), CHUNK_NEW_TOKENS), compared=False
        )
        for p in prompts:
            name = f"{p.tokens} after {filler.prompt.tokens} of {chunk}"
            cases.append(batch_case(axis, name, [first, filler, Ask(p)], as_list=True))
    cases = [c for c in cases if holds(ctx, c.needs, 2 * chunk)]
    if not cases:
        raise Skip(f"the KV pool of {facts.max_total} tokens holds no two chunks of {chunk}")
    return cases


def prefix_cache(ctx: Context) -> list[Case]:
    """The prompt again with all, half or a little of it cached; a case without a hit is no test."""
    axis, facts = Axis.PREFIX_CACHE, ctx.facts
    if not facts.radix:
        raise Skip("the prefix cache is off")
    page = facts.page_size
    lengths = [131] if ctx.quick else [96, 131, 64, 257]
    lengths = [max(n, 4 * page + 3) for n in lengths]
    if facts.chunk and facts.chunk + 17 <= min(facts.max_input - 64, 3000) and not ctx.quick:
        lengths.append(facts.chunk + 17)
    lengths = [n for n in lengths if n <= facts.max_input - 64]
    prompts = [ctx.prompts.random(f"prefix-{i}", n) for i, n in enumerate(lengths)]
    if not prompts:
        raise Skip(f"no prompt of four pages fits {facts.max_input} tokens")
    subject = ctx.prompts.subject
    cases = [warmed(axis, "warm", [subject], [subject])] if subject.tokens > page else []
    for p in prompts:
        half, little = p.tokens // 2, page * (17 // page + 1)
        other = cut(ctx, p, half, tail=23)
        cases += [
            warmed(axis, "warm", [p], [p]),
            warmed(axis, f"first {half} warm", [cut(ctx, p, half)], [p]),
            warmed(axis, f"first {half} warm from another prompt", [other], [p]),
            warmed(axis, f"first {little} warm", [cut(ctx, p, little)], [p]),
        ]
    several = [p for p in [*prompts, *ctx.prompts.pool(8)] if p.tokens > page]
    cases.append(warmed(axis, "all warm, together", several, several))
    mixed = [*prompts, *(p for p in ctx.prompts.pool(12) if p not in several)]
    cases.append(warmed(axis, "warm and cold, together", prompts, mixed, all_hit=False))
    return [c for c in cases if ctx.fits(c.needs)]


def prefill_vs_decode(ctx: Context) -> list[Case]:
    """Generated tokens computed by decode, by prefill, and read back from the cache."""
    axis = Axis.PREFILL_VS_DECODE
    prompts = [p for p in ctx.prompts.pool(4 if ctx.quick else 10, with_texts=False)]
    cases = [Case(axis, "rescored", (p,), rescored([p])) for p in prompts]
    if ctx.fits([with_answer(p, ctx) for p in prompts]):
        cases.append(Case(axis, "rescored together", tuple(prompts), rescored(prompts)))
    few = prompts[:2] if ctx.quick else prompts[:5]
    for p in few:
        n = p.new_tokens
        for k in (1, n // 2, n - 1) if not ctx.quick else (n // 2,):
            cases.append(Case(axis, f"{k} tokens prefilled", (p,), continued(p, k, warm=False)))
            if reads_decoded(ctx, p, k):
                run = continued(p, k, warm=True)
                cases.append(Case(axis, f"{k} decoded tokens in the cache", (p,), run))
    return cases


def holds(ctx: Context, prompts: tuple[Prompt, ...], others: int) -> bool:
    """Whether the prompts, and neighbours of so many tokens in all, can run together."""
    tokens = others + sum(p.tokens + p.new_tokens for p in prompts)
    return len(prompts) + 2 <= ctx.facts.max_running and tokens <= 0.9 * ctx.facts.max_total


def reads_decoded(ctx: Context, prompt: Prompt, k: int) -> bool:
    """Whether a prompt and k tokens of its answer, sent again, hit KV that decode wrote.

    The last token of a prompt is never read from the cache, nor is part of a page.
    """
    page = ctx.facts.page_size
    return ctx.facts.radix and (prompt.tokens + k - 1) // page * page > prompt.tokens


def cut(ctx: Context, prompt: Prompt, k: int, tail: int = 0) -> Prompt:
    """The first k ids of a prompt, and tail ids of its own."""
    rng = ctx.rng(f"{prompt.name}:tail")
    own = tuple(rng.randrange(ctx.facts.vocab_size) for _ in range(tail))
    name = f"{prompt.name}-cut{k}" + ("-other" if tail else "")
    return Prompt(name, prompt.ids[:k] + own, None, k + tail, 1)


def warmed(
    axis: Axis, name: str, before: list[Prompt], asked: list[Prompt], all_hit: bool = True
) -> Case:
    """Send `before`, then ask: answers that should have hit the cache and did not are left out."""

    async def run(ctx: Context) -> list[Seen]:
        for p in before:
            await ctx.one(Ask(p))
        seen = await ctx.together([Ask(p) for p in asked])
        hits = [s for s in seen if s.answer.cached > 0 or not all_hit]
        if len(hits) < len(seen):
            ctx.note(axis, f"{len(seen) - len(hits)} without a hit in {name!r}, not counted")
        return hits if any(s.answer.cached for s in seen) else []

    return Case(axis, f"{name} ({asked[0].tokens} tokens)", tuple(asked), run)


def rescored(prompts: list[Prompt]):
    """Prefill prompt and answer together and compare the logprobs of the answer's tokens."""

    async def run(ctx: Context) -> list[Seen]:
        asks = []
        for p in prompts:
            start = {"logprob_start_len": p.tokens - 1}
            asks.append(Ask(with_answer(p, ctx), {"max_new_tokens": 1}, start))
        replies = await ctx.server.generate(
            {k: [a.body()[k] for a in asks] for k in asks[0].body()}
        )
        pairs = zip(prompts, replies, strict=True)
        return [Seen(p.name, _scored(r, p.new_tokens), ctx.oracles[p]) for p, r in pairs]

    return run


def with_answer(prompt: Prompt, ctx: Context) -> Prompt:
    """The prompt with its own answer, where known, as a prompt."""
    answer = ctx.oracles.get(prompt)
    more = answer.tokens if answer else (0,) * prompt.new_tokens
    return Prompt(f"{prompt.name}+", prompt.ids + more, None, prompt.tokens + len(more), 1)


def _scored(reply: dict, n: int) -> Answer:
    """The last n prompt tokens with their logprobs, as if they had been generated."""
    meta = reply["meta_info"]
    scored = meta["input_token_logprobs"][-n:]
    return Answer(
        tuple(t for _, t, *_ in scored),
        tuple(hex_bits(p) for p, *_ in scored),
        top_entries(meta["input_top_logprobs"][-n:]),
    )


def continued(prompt: Prompt, k: int, *, warm: bool):
    """Ask for the rest of an answer whose first k tokens are part of the prompt."""

    async def run(ctx: Context) -> list[Seen]:
        oracle = ctx.oracles[prompt]
        ids = prompt.ids + oracle.tokens[:k]
        rest = Prompt(f"{prompt.name}+{k}", ids, None, len(ids), prompt.new_tokens - k)
        if warm:
            await ctx.one(Ask(prompt))
        answer = native_answer(await ctx.server.generate(Ask(rest).body()))
        if warm and answer.cached <= prompt.tokens:
            ctx.note(Axis.PREFILL_VS_DECODE, "decoded tokens were not read back from the cache")
            return []
        return [Seen(rest.name, answer, oracle.after(k))]

    return run
