"""Which kernels are known not to depend on the batch, and why: rules as data, in ``rules_data``.

A rule lists names. A name is literal but for fields, ``${field}``: a field stands for one of the
strings that its file lists for it, ``${int}`` for a decimal number and ``${flag}`` for true or
false. There is nothing else, no wildcard, so a rule holds no kernel that nobody wrote down. A
refusal is the other way round: a word that makes a name unknown, whatever a rule says.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from sgl_det.audit.names import canonical, squeeze

DATA = Path(__file__).with_name("rules_data")
_FIELD = re.compile(r"\$\{(\w+)\}")
_BUILT_IN = {"int": r"\d+", "flag": "(?:true|false)"}
_NO_RULE = "no rule has this name"


class Kind(StrEnum):
    """How a kernel may be trusted; the last is a finding."""

    POINTWISE = "pointwise"
    PROVEN = "proven invariant"
    FIXED = "fixed order"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Why some kernels are invariant.

    id      family and name, for the table
    kind    pointwise: each element from its own inputs, or moved; proven invariant: compared bit
            for bit at start-up; fixed order: a row's sum has one order by construction
    why     one sentence
    source  where it can be checked
    names   canonical names, with fields
    proof   what must be in the worker's report of start-up proofs, or None
    """

    id: str
    kind: Kind
    why: str
    source: str
    names: tuple[str, ...]
    proof: str | None = None
    expression: re.Pattern[str]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of one kernel; ``rule`` is empty where no rule holds."""

    kind: Kind
    rule: str
    why: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class Rules:
    """All rules, and the words that refuse a name with their reasons."""

    rules: tuple[Rule, ...]
    refused: Mapping[str, str]

    def of(self, name: str) -> tuple[Rule, ...]:
        """The rules that hold a canonical name."""
        return tuple(r for r in self.rules if r.expression.fullmatch(name))

    def judge(self, name: str, proofs: Container[str] = ()) -> Verdict:
        """The verdict on a kernel; ``proofs`` are those that ran in the server."""
        name = canonical(name)
        for word, why in self.refused.items():
            if word in name.lower():
                return Verdict(Kind.UNKNOWN, "", why)
        rule = next(iter(self.of(name)), None)
        if rule is None:
            return Verdict(Kind.UNKNOWN, "", _NO_RULE)
        if rule.proof is not None and rule.proof not in proofs:
            why = f"{rule.id} needs the start-up proof {rule.proof!r}, which this server has not"
            return Verdict(Kind.UNKNOWN, "", why)
        return Verdict(rule.kind, rule.id, rule.why, rule.source)


def load(folder: Path = DATA) -> Rules:
    """Every rule of a folder. ValueError names the file that is not of the form."""
    rules: list[Rule] = []
    refused: dict[str, str] = {}
    for path in sorted(folder.glob("*.toml")):
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
            fields = data.get("fields", {})
            rules += [_rule(path.stem, entry, fields) for entry in data.get("rule", ())]
            refused |= {e["word"].lower(): e["why"] for e in data.get("refused", ())}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path.name}: {error}") from error
    return Rules(tuple(rules), refused)


def _rule(family: str, entry: Mapping[str, Any], fields: Mapping[str, Iterable[str]]) -> Rule:
    texts = {key: entry[key].strip() for key in ("id", "class", "why", "source")}
    empty = [key for key, text in texts.items() if not text]
    if empty or not entry["names"]:
        raise ValueError(f"rule {texts['id']!r} leaves {empty or 'names'} empty")
    kind = Kind(texts["class"])
    if kind is Kind.UNKNOWN or (kind is Kind.PROVEN) != ("proof" in entry):
        raise ValueError(f"rule {texts['id']!r}: 'proven invariant', and only it, names a proof")
    names = tuple(canonical(name) for name in entry["names"])
    return Rule(
        id=f"{family}.{texts['id']}",
        kind=kind,
        why=texts["why"],
        source=texts["source"],
        names=names,
        proof=entry.get("proof"),
        expression=re.compile("|".join(f"(?:{_expression(n, fields)})" for n in names)),
    )


def _expression(text: str, fields: Mapping[str, Iterable[str]]) -> str:
    """A name, or a field's value, as a regular expression."""
    out, at = [], 0
    for hit in _FIELD.finditer(text):
        out.append(re.escape(squeeze(text[at : hit.start()])))
        if hit[1] in _BUILT_IN:
            out.append(_BUILT_IN[hit[1]])
        elif hit[1] in fields:
            values = (_expression(v, fields) for v in fields[hit[1]])
            out.append(f"(?:{'|'.join(values)})")
        else:
            raise ValueError(f"field {hit[1]!r} of {text!r} has no values in this file")
        at = hit.end()
    return "".join([*out, re.escape(squeeze(text[at:]))])
