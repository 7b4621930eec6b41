"""The closed world: what must not start, and what starts with fewer claims."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from sgl_det.argument_table import TABLE
from sgl_det.arguments import BackendLimits, Context, Verdict, describe, findings, flag
from sgl_det.axis import Axis
from sgl_det.model_rules import MODEL_RULES, judge_model

_FALSE = frozenset({"", "0", "false", "no", "n"})
_TRUE = frozenset({"1", "true", "yes", "y"})
_NOT_IN_KEY = "it changes the bits, and the numerics key does not record it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """An environment variable that SGLang or a library below it honours.

    harmless  values, in lower case, that change nothing; None stands for any that is not set
    reason    why other values are refused
    drops     axes lost when lifted; None means all of them
    liftable  False where the server could not work
    """

    harmless: frozenset[str]
    reason: str
    drops: tuple[Axis, ...] | None = None
    liftable: bool = True


def _unkeyed(*harmless: str) -> Variable:
    return Variable(harmless=frozenset(harmless), reason=_NOT_IN_KEY, drops=(Axis.RESTART,))


VARIABLES: Mapping[str, Variable] = {
    "SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_FALLBACK_VARIANT": Variable(
        harmless=_FALSE, reason="it sends matrix products to kernels chosen by the number of rows"
    ),
    "SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_COMPARISON_TEST": Variable(
        harmless=_FALSE, reason="it ends the server where two kernels differ by a rounding"
    ),
    "SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_DEEPGEMM": _unkeyed("", *_TRUE),
    "SGLANG_ENABLE_JIT_DEEPGEMM": _unkeyed("", *_TRUE),
    "SGLANG_ROPE_CACHE_FP32": _unkeyed(*_FALSE),
    "SGLANG_RETURN_ORIGINAL_LOGPROB": _unkeyed(*_FALSE),
    "NVIDIA_TF32_OVERRIDE": _unkeyed(""),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": _unkeyed(*_FALSE),
    "TRITON_F32_DEFAULT": _unkeyed(""),
    "SGLANG_USE_SGL_FA3_KERNEL": Variable(
        harmless=frozenset({"", *_TRUE}), reason="another build of FA3 has not been reviewed"
    ),
    "SGLANG_FORCE_FUSED_OP_BACKEND": Variable(
        harmless=frozenset({""}), reason="it replaces norms and other operators all at once"
    ),
    "SGLANG_EXTERNAL_MODEL_PACKAGE": Variable(
        harmless=frozenset({""}), reason="it replaces model classes by ones that were not read"
    ),
    "SGLANG_DEBUG_REVERT_PR": Variable(
        harmless=frozenset({"", "0"}), reason="it takes back changes of the reviewed version"
    ),
    "SGL_CPU_QUANTIZATION": Variable(harmless=_FALSE, reason="it quantises the weights"),
    "SGLANG_USE_HND_KVCACHE": Variable(
        harmless=_FALSE, reason="kernels then read another memory layout, not reviewed"
    ),
    "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE": Variable(
        harmless=_FALSE,
        reason="this radix cache has not been reviewed",
        drops=(Axis.PREFIX_CACHE,),
    ),
    "SGLANG_ENABLE_UNIFIED_RADIX_TREE": Variable(
        harmless=_FALSE,
        reason="this radix cache has not been reviewed",
        drops=(Axis.PREFIX_CACHE,),
    ),
    "SGLANG_RUST_SERVER": Variable(
        harmless=_FALSE,
        reason="the Rust server has neither GET /determinism nor our checks of requests",
        liftable=False,
    ),
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """One reason not to start: the name that lifts it, and a sentence with the way out."""

    name: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the arguments mean.

    refusals  the server must not start while there are any
    lifted    names of refusals that the user lifted, each met by these arguments
    dropped   axes that are no longer claimed, each with the reason
    """

    refusals: tuple[Refusal, ...] = ()
    lifted: tuple[str, ...] = ()
    dropped: Mapping[Axis, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Met:
    name: str
    found: str
    reason: str
    way_out: str
    drops: tuple[Axis, ...] | None
    liftable: bool


def names() -> frozenset[str]:
    """Every name that ``--det-allow`` may lift."""
    arguments = {name for name, rule in TABLE.items() if rule.liftable and rule.can_refuse}
    models = {rule.name for rule in MODEL_RULES if rule.liftable}
    return frozenset(arguments | models | {n for n, v in VARIABLES.items() if v.liftable})


def judge(
    server_args: Any,
    model_config: Any,
    backend_limits: BackendLimits,
    environ: Mapping[str, str],
    allow: frozenset[str] = frozenset(),
) -> Judgement:
    """Judge SGLang's resolved arguments, the model's config and the environment.

    server_args     SGLang's ``ServerArgs``, after its ``__post_init__``
    model_config    what ``server_args.get_model_config()`` returns
    backend_limits  the limits of the attention backend that was resolved
    environ         the environment that the worker processes will inherit
    allow           names of refusals to lift; dashes and underscores are the same
    """
    context = Context(
        server_args=server_args, model_config=model_config, limits=backend_limits, environ=environ
    )
    wanted = {name.replace("-", "_"): name for name in allow}
    known = names() | {f.name for f in fields(server_args)} - TABLE.keys()
    refusals = [_unknown(name) for key, name in sorted(wanted.items()) if key not in known]
    lifted: list[str] = []
    dropped = _not_claimed(context)
    for met in _met(context):
        if met.liftable and met.name in wanted:
            lifted += [met.name] if met.name not in lifted else []
            for axis in tuple(Axis) if met.drops is None else met.drops:
                dropped.setdefault(axis, f"{met.name} was allowed: {met.reason}")
        else:
            refusals.append(Refusal(met.name, _sentence(met)))
    return Judgement(tuple(refusals), tuple(lifted), dropped)


def _met(context: Context) -> Iterator[_Met]:
    for finding in findings(TABLE, context):
        rule = finding.rule
        if rule.verdict is not Verdict.NOT_CLAIMED:
            way_out = rule.way_out or f"leave out {flag(finding.name)}"
            yield _Met(
                finding.name, describe(finding), rule.reason, way_out, rule.drops, rule.liftable
            )
    for rule, found in judge_model(context):
        yield _Met(rule.name, found, rule.reason, rule.way_out, rule.drops, rule.liftable)
    for name, variable in VARIABLES.items():
        value = context.environ.get(name)
        if value is not None and value.strip().lower() not in variable.harmless:
            found = f"the environment variable {name} is {value!r}"
            yield _Met(name, found, variable.reason, "unset it", variable.drops, variable.liftable)


def _not_claimed(context: Context) -> dict[Axis, str]:
    dropped: dict[Axis, str] = {}
    for finding in findings(TABLE, context):
        if finding.rule.verdict is Verdict.NOT_CLAIMED:
            for axis in finding.rule.drops or tuple(Axis):
                dropped.setdefault(axis, f"{flag(finding.name)}: {finding.rule.reason}")
    return dropped


def _sentence(met: _Met) -> str:
    last = ""
    if met.liftable:
        lost = "any claim" if met.drops is None else f"the claim {' and '.join(met.drops)}"
        last = f", or start without {lost} with --det-allow {met.name}"
    return f"{met.found}: {met.reason}; {met.way_out}{last}"


def _unknown(name: str) -> Refusal:
    near = difflib.get_close_matches(name.replace("-", "_"), names(), n=1)
    hint = f"did you mean {near[0]}?" if near else "leave it out"
    return Refusal(name, f"--det-allow {name}: no refusal that can be lifted has this name; {hint}")
