"""The table of server arguments: complete, frozen, and each rule fit to be read by a user."""

from __future__ import annotations

import ast
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from sgl_det.argument_table import TABLE
from sgl_det.arguments import Verdict, assemble, flag, neutral, one_of
from sgl_det.axis import Axis
from sgl_det.model_rules import MODEL_RULES
from sgl_det.refusals import VARIABLES, names

# A change here is a change of what is promised: look at the argument before changing the number.
COUNTS = {
    Verdict.NEUTRAL: 329,
    Verdict.CLAIMED: 47,
    Verdict.NOT_CLAIMED: 3,
    Verdict.REFUSED: 79,
}
ARGUMENTS = 458


@pytest.fixture(scope="module")
def fields() -> list[str]:
    """The fields of SGLang's ServerArgs, read from its source: importing it takes half a minute."""
    source = Path(find_spec("sglang").submodule_search_locations[0], "srt", "server_args.py")
    tree = ast.parse(source.read_text())
    owner = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "ServerArgs")
    return [
        n.target.id
        for n in owner.body
        if isinstance(n, ast.AnnAssign) and "ClassVar" not in ast.unparse(n.annotation)
    ]


def test_every_argument_has_a_verdict(fields):
    assert len(fields) == ARGUMENTS
    assert [name for name in fields if name not in TABLE] == []


def test_no_verdict_is_stale(fields):
    assert [name for name in TABLE if name not in fields] == []


def test_verdicts_are_frozen():
    assert Counter(rule.verdict for rule in TABLE.values()) == COUNTS


@pytest.mark.parametrize("name", TABLE)
def test_rule_is_readable(name):
    rule = TABLE[name]
    assert rule.reason and not rule.reason.endswith(".")
    if rule.can_refuse and rule.allowed is not None:
        assert rule.expected, "a refusal says what was expected"
    if rule.verdict is Verdict.NOT_CLAIMED:
        assert rule.drops, "a verdict 'not claimed' names its axes"


def test_dependent_arguments_name_something_that_is_refused():
    refusable = {n for n, r in TABLE.items() if r.can_refuse} | {r.name for r in MODEL_RULES}
    assert {r.needs for r in TABLE.values() if r.needs} - refusable == set()


def test_names_of_refusals_are_distinct():
    # Weights can be quantised by an argument or by the checkpoint; one name lifts both.
    shared = TABLE.keys() & {rule.name for rule in MODEL_RULES}
    assert shared == {"quantization"}
    assert not VARIABLES.keys() & (TABLE.keys() | {rule.name for rule in MODEL_RULES})
    assert {"tp_size", "rope", "NVIDIA_TF32_OVERRIDE"} <= names()
    never = {"port", "chunked_prefill_size", "enable_deterministic_inference", "sliding_window"}
    assert not never & names()


def test_a_second_rule_for_an_argument_is_an_error():
    with pytest.raises(ValueError, match="two rules: port"):
        assemble({"port": neutral("a")}, {"port": neutral("b")})


def test_true_is_not_one():
    assert one_of(1)(1, None) and not one_of(1)(True, None)
    assert one_of(1.0)(1, None)


def test_drops_are_axes():
    for rule in [*TABLE.values(), *MODEL_RULES, *VARIABLES.values()]:
        assert all(isinstance(axis, Axis) for axis in rule.drops or ())


def test_flag_is_sglangs():
    assert flag("tp_size") == "--tp-size"
