"""Verdicts on SGLang's server arguments: the mechanism, without the table.

An argument is judged by its resolved value, after SGLang has filled in its defaults. Every field
has exactly one rule in ``sgl_det.argument_table``; a field without a rule is refused as soon as its
value differs from SGLang's default, so that a new argument cannot slip in unread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from sgl_det.axis import Axis


class Verdict(StrEnum):
    """What an argument means for the claims.

    NEUTRAL      cannot reach the logits; any value
    CLAIMED      reaches the computation or the schedule, and the claims hold for the allowed values
    NOT_CLAIMED  other than allowed values start, and the axes in ``drops`` are no longer claimed
    REFUSED      other than allowed values do not start, unless the user lifts the refusal
    """

    NEUTRAL = "neutral"
    CLAIMED = "claimed"
    NOT_CLAIMED = "not claimed"
    REFUSED = "refused"


class BackendLimits(Protocol):
    """What an attention backend holds; ``sgl_det.backend.Backend`` is one."""

    name: str
    head_dims: frozenset[int] | None
    dtypes: frozenset[str]
    windows: bool
    split_tokens: Mapping[str, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Everything a predicate may look at.

    server_args   SGLang's resolved ``ServerArgs``
    model_config  SGLang's ``ModelConfig`` of the served model
    limits        the attention backend's limits
    environ       the environment that the worker processes will inherit
    """

    server_args: Any
    model_config: Any
    limits: BackendLimits
    environ: Mapping[str, str]


Allowed = Callable[[Any, Context], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The verdict on one argument.

    verdict   see Verdict
    reason    why, in a clause
    allowed   values for which nothing happens; None means SGLang's default only
    expected  the allowed values in words, for the refusal
    way_out   what to do instead; by default, to leave the flag out
    drops     axes lost when a refusal is lifted or a value is not claimed; None means all of them
    liftable  False where lifting would only lead to a crash or to a server without our patches
    needs     the argument or model rule without which this argument is not read
    """

    verdict: Verdict
    reason: str
    allowed: Allowed | None = None
    expected: str = ""
    way_out: str = ""
    drops: tuple[Axis, ...] | None = None
    liftable: bool = True
    needs: str = ""

    @property
    def can_refuse(self) -> bool:
        """Whether some value of the argument keeps the server from starting."""
        return self.verdict in (Verdict.CLAIMED, Verdict.REFUSED) and self.allowed is not anything


def anything(value: Any, context: Context) -> bool:
    """Every value is allowed."""
    return True


def one_of(*values: Any) -> Allowed:
    """The given values are allowed; True and 1 are different values."""

    def allowed(value: Any, context: Context) -> bool:
        return any(_equal(value, v) for v in values)

    return allowed


def _equal(a: Any, b: Any) -> bool:
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def neutral(reason: str) -> Rule:
    """An argument that cannot reach the logits."""
    return Rule(verdict=Verdict.NEUTRAL, reason=reason, allowed=anything)


def part_of(needs: str, what: str) -> Rule:
    """An argument that is not read unless ``needs`` is in use, which has its own verdict."""
    reason = f"{what}; not read without {needs}, which is refused"
    return Rule(verdict=Verdict.NEUTRAL, reason=reason, allowed=anything, needs=needs)


def claimed(reason: str, allowed: Allowed = anything, expected: str = "", **more: Any) -> Rule:
    """An argument whose allowed values keep every claim; other values are refused."""
    return Rule(verdict=Verdict.CLAIMED, reason=reason, allowed=allowed, expected=expected, **more)


def not_claimed(reason: str, *drops: Axis, allowed: Allowed | None = None) -> Rule:
    """An argument that starts, and costs the given axes when its value is not an allowed one."""
    return Rule(verdict=Verdict.NOT_CLAIMED, reason=reason, allowed=allowed, drops=drops)


def refused(reason: str, allowed: Allowed | None = None, expected: str = "", **more: Any) -> Rule:
    """An argument that is refused unless its value is an allowed one, by default SGLang's own."""
    return Rule(verdict=Verdict.REFUSED, reason=reason, allowed=allowed, expected=expected, **more)


def assemble(*parts: Mapping[str, Rule]) -> dict[str, Rule]:
    """One table out of its parts. Raises ValueError when an argument has two rules."""
    table: dict[str, Rule] = {}
    for part in parts:
        twice = table.keys() & part.keys()
        if twice:
            raise ValueError(f"arguments with two rules: {', '.join(sorted(twice))}")
        table |= part
    return table


@dataclass(frozen=True, slots=True)
class Finding:
    """An argument whose value is not among the allowed ones, with the rule that says so."""

    name: str
    value: Any
    default: Any
    rule: Rule


_UNKNOWN = Rule(verdict=Verdict.REFUSED, reason="this argument has no verdict")


def findings(table: Mapping[str, Rule], context: Context) -> Iterator[Finding]:
    """The arguments of ``context`` that their rules do not allow, in SGLang's order."""
    for field in dataclasses.fields(context.server_args):
        value = getattr(context.server_args, field.name)
        rule = table.get(field.name, _UNKNOWN)
        default = default_of(field)
        if rule.allowed is None:
            fine = _equal(value, default)
        else:
            fine = rule.allowed(value, context)
        if not fine:
            yield Finding(field.name, value, default, rule)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """A field's default, or ``dataclasses.MISSING`` for a required one."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def describe(finding: Finding) -> str:
    """The start of a refusal: what was found and what was expected."""
    text = repr(finding.value)
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    expected = finding.rule.expected or repr(finding.default)
    return f"{flag(finding.name)} is {shown}, expected {expected}"


def flag(name: str) -> str:
    """SGLang's command line flag for a field name."""
    return "--" + name.replace("_", "-")
