"""Axes on which the way of asking changes: streams, other endpoints, logprobs for a neighbour."""

from __future__ import annotations

import asyncio
from typing import Any

from sgl_det.axis import Axis
from sgl_det.probe.cases import TOP_LOGPROBS, Ask, Case, Context, Seen, batch_case
from sgl_det.probe.compare import Answer, hex_bits
from sgl_det.probe.prompts import Prompt
from sgl_det.probe.replies import joined_stream, native_answer


def streaming(ctx: Context) -> list[Case]:
    """Streamed answers against plain ones: /generate, /v1/completions, /v1/chat/completions."""
    axis = Axis.STREAMING
    prompts = ctx.prompts.pool(ctx.room(6))
    few = [*prompts[: 2 if ctx.quick else 5], prompts[-1]]
    cases = [Case(axis, "/generate", (p,), _streamed([p], [])) for p in few]
    cases.append(
        Case(axis, "/generate, mixed", tuple(prompts), _streamed(prompts[::2], prompts[1::2]))
    )
    texts = ctx.prompts.texts[: 1 if ctx.quick else 3]
    for p in [ctx.prompts.subject, *texts]:
        cases.append(Case(axis, "/v1/completions", (p,), _completions(p)))
    return [*cases, *(Case(axis, "/v1/chat/completions", (), _chat(p)) for p in texts)]


def logprob_neighbour(ctx: Context) -> list[Case]:
    """Logprobs asked for or not, by the request itself and by the others in its batch."""
    axis = Axis.LOGPROB_NEIGHBOUR
    mine = [Ask(p) for p in ctx.prompts.pool(2 if ctx.quick else 3)]
    others = [p for p in ctx.prompts.pool(6) if p not in [a.prompt for a in mine]]
    none = {"return_logprob": False, "top_logprobs_num": 0}
    every = {"logprob_start_len": 0, "top_logprobs_num": 20}
    kinds = {"no logprobs": none, "top 0": {"top_logprobs_num": 0}, "all input, top 20": every}
    cases = [
        batch_case(axis, f"asks itself: {name}", [Ask(a.prompt, {}, extra)])
        for name, extra in kinds.items()
        for a in mine
    ]
    beside = {n: [Ask(p, {}, extra) for p in others] for n, extra in kinds.items()}
    quiet = [Ask(a.prompt, {}, none) for a in mine]
    loud = beside["all input, top 20"]
    for name, neighbours in beside.items():
        if ctx.fits([a.prompt for a in (*mine, *neighbours)]):
            cases.append(batch_case(axis, f"neighbours ask: {name}", [*mine, *neighbours]))
    if ctx.fits([a.prompt for a in (*quiet, *loud)]):
        cases.append(batch_case(axis, "only the neighbours ask", [*quiet, *loud]))
    return cases


def _streamed(streamed: list[Prompt], plain: list[Prompt]):
    async def one(ctx: Context, p: Prompt) -> Answer:
        return native_answer(joined_stream(await ctx.server.events("/generate", Ask(p).body())))

    async def run(ctx: Context) -> list[Seen]:
        both = await asyncio.gather(
            ctx.together([Ask(p) for p in plain]), *(one(ctx, p) for p in streamed)
        )
        pairs = zip(streamed, both[1:], strict=True)
        return [*both[0], *(Seen(p.name, answer, ctx.oracles[p]) for p, answer in pairs)]

    return run


def _completions(prompt: Prompt):
    """Plain against /generate, and streamed against plain."""

    async def run(ctx: Context) -> list[Seen]:
        oracle = ctx.oracles[prompt]
        body = _openai_body(ctx, prompt) | {
            "prompt": prompt.text if prompt.ids is None else list(prompt.ids),
            "logprobs": TOP_LOGPROBS,
        }
        plain = await ctx.server.ok("POST", "/v1/completions", body)
        whole = _completion_answer([plain])
        await ctx.server.flush()
        parts = _completion_answer(await ctx.server.events("/v1/completions", body))
        # This endpoint gives texts for tokens: with /generate it has the logprobs in common.
        same = len(whole.logprobs) == len(oracle.tokens)
        ids = oracle.tokens if same else whole.tokens
        name = f"{prompt.name} (completions)"
        return [
            Seen(prompt.name, Answer(ids, whole.logprobs), Answer(oracle.tokens, oracle.logprobs)),
            Seen(name, parts, whole),
        ]

    return run


def _chat(prompt: Prompt):
    async def run(ctx: Context) -> list[Seen]:
        body = _openai_body(ctx, prompt) | {
            "messages": [{"role": "user", "content": prompt.text}],
            "logprobs": True,
            "top_logprobs": TOP_LOGPROBS,
        }
        status, _ = await ctx.server.call("POST", "/v1/chat/completions", body)
        if status in (400, 404):
            ctx.note(Axis.STREAMING, "chat refused, not counted")
            return []
        await ctx.server.flush()
        plain = [await ctx.server.ok("POST", "/v1/chat/completions", body)]
        await ctx.server.flush()
        events = await ctx.server.events("/v1/chat/completions", body)
        name, texts = f"{prompt.name} (chat)", (_chat_text(plain), _chat_text(events))
        if texts[0] != texts[1]:
            return [Seen(name, Answer((texts[1],)), Answer((texts[0],)))]
        whole, parts = _chat_answer(plain), _chat_answer(events)
        return [Seen(name, parts, _kept(whole, parts))]

    return run


def _openai_body(ctx: Context, prompt: Prompt) -> dict[str, Any]:
    return {
        "max_tokens": prompt.new_tokens,
        "model": ctx.facts.model,
        "temperature": 0.0,
        "ignore_eos": True,
    }


def _completion_answer(replies: list[dict]) -> Answer:
    """The Answer in a plain reply (one) or in a stream's events (many)."""
    parts = [c["logprobs"] for r in replies for c in r["choices"] if c.get("logprobs")]
    top = [tuple((t, hex_bits(v)) for t, v in d.items()) for x in parts for d in x["top_logprobs"]]
    return Answer(
        tuple(t for x in parts for t in x["tokens"]),
        tuple(hex_bits(v) for x in parts for v in x["token_logprobs"]),
        tuple(top),
    )


def _chat_text(replies: list[dict]) -> str:
    choices = [c for r in replies for c in r["choices"]]
    return "".join((c.get("message") or c["delta"]).get("content") or "" for c in choices)


def _chat_answer(replies: list[dict]) -> Answer:
    """As above, without top logprobs: a streamed chunk of several tokens repeats the first's."""
    parts = [c["logprobs"] for r in replies for c in r["choices"] if c.get("logprobs")]
    rows = [row for x in parts for row in x.get("content") or ()]
    return Answer(tuple(r["token"] for r in rows), tuple(hex_bits(r["logprob"]) for r in rows))


def _kept(whole: Answer, parts: Answer) -> Answer:
    """The tokens of a plain chat answer that its stream reports.

    SGLang's chat stream has no chunk, and so no logprob, for a token that ends no character. Its
    rows must be those of the plain answer with only such rows left out; if not, all are compared.
    """
    rows = list(zip(whole.tokens, whole.logprobs, strict=True))
    wanted = list(zip(parts.tokens, parts.logprobs, strict=True))
    rest = iter(rows)
    found = all(w in rest for w in wanted)
    return parts if found and wanted else whole
