"""What a Patch may say, and the digits that name a source."""

from __future__ import annotations

import inspect

import pytest

import fake_upstream
from fake_upstream import TARGETS, patch
from sgl_det.patch import Patch, fingerprint

MALFORMED = {
    "no_upper_bound": ({"requires": "fakeup>=1.2"}, "has no upper bound"),
    "only_excluded": ({"requires": "fakeup!=1.2"}, "has no upper bound"),
    "no_version": ({"requires": "fakeup"}, "has no upper bound"),
    "not_pep508": ({"requires": "fakeup >> 1"}, "is malformed"),
    "no_fingerprint": ({"fingerprints": ()}, "fingerprints must be 12 hex digits"),
    "short_fingerprint": ({"fingerprints": ("abc",)}, "fingerprints must be 12 hex digits"),
    "dotted_target": ({"target": "fakeup.ops.scale"}, "is not 'package.module:qualname'"),
    "no_reason": ({"why": ""}, "name, why and upstream must be given"),
    "no_way_out": ({"upstream": ""}, "name, why and upstream must be given"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_patch_cannot_be_made(case):
    changes, message = MALFORMED[case]
    fields = {
        "name": "x",
        "target": "fakeup.ops:scale",
        "requires": "fakeup<2",
        "fingerprints": ("0" * 12,),
        "why": "a test",
        "upstream": "none: a test",
        "wrap": fake_upstream.marked,
    }
    Patch(**fields)
    with pytest.raises(ValueError, match=message):
        Patch(**{**fields, **changes})


@pytest.mark.parametrize("name", TARGETS)
def test_one_fingerprint_from_text_file_and_function(ops, name):
    """Decorated, nested, with a trailing comment or text at column zero: one name."""
    owner = ops
    for part in TARGETS[name].partition(":")[2].split("."):
        owner, value = getattr(owner, part), vars(owner)[part]
    assert patch(name).fingerprints == (fingerprint(value),)
    source = inspect.getsource(inspect.unwrap(getattr(value, "__func__", value)))
    assert fingerprint(source) == fingerprint(value)


def test_text_that_is_no_function_has_no_fingerprint():
    for text in ("x = 1", "class C:\n    pass", "def f(:", ""):
        with pytest.raises(ValueError, match="not the source of one function"):
            fingerprint(text)
