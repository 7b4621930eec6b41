"""The life of patches on a fake upstream: every order of steps, refusals, undoing, verifying."""

from __future__ import annotations

import functools
import inspect
import itertools
import subprocess
import sys
import types
from importlib import import_module

import pytest

import fake_upstream
from fake_upstream import TARGETS, patch, patches, wrong
from sgl_det.patch import PatchError, PatchSet, fingerprint

STEPS = ("import", "apply", "apply", "revert", "revert")
ORDERS = sorted(set(itertools.permutations(STEPS)))
_ran: set[tuple[str, ...]] = set()


def _bound(module) -> dict[str, object]:
    """Every binding of the module and of its classes, by identity."""
    found = {k: v for k, v in vars(module).items() if k != "__builtins__"}
    classes = {k: dict(vars(v)) for k, v in found.items() if isinstance(v, type)}
    return {**found, **classes, "REGISTRY": {**module.REGISTRY}, "STAGES": [*module.STAGES]}


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_every_order_of_steps(order):
    _ran.add(order)
    child = subprocess.run(
        [sys.executable, fake_upstream.__file__, *order], capture_output=True, text=True, timeout=60
    )
    assert child.returncode == 0, child.stderr


def test_every_order_ran(request):
    """30 distinct orders exist; none may be lost from the list above."""
    assert len(ORDERS) == 30
    selected = [i for i in request.session.items if i.name.startswith("test_every_order_of_steps")]
    assert len(selected) in (0, 30) or request.config.option.keyword
    assert len(_ran) == len(selected)


def test_all_bindings_are_rewritten_and_given_back(ops):
    before = _bound(ops)
    a_set = PatchSet(patches())
    a_set.apply()
    assert wrong(patched=True) == []
    assert a_set.found == {p.name: p.fingerprints[0] for p in a_set.patches}
    a_set.revert()
    assert wrong(patched=False) == []
    assert _bound(ops) == before


def test_descriptor_kind_and_metadata_are_kept(ops):
    a_set = PatchSet(patches())
    a_set.apply()
    assert type(vars(ops.Wrapper)["shift"]) is staticmethod
    assert type(vars(ops.Wrapper)["make"]) is classmethod
    assert ops.Wrapper.plan.__qualname__ == "Wrapper.plan"
    assert ops.decorated.traced
    assert list(inspect.signature(ops.scale).parameters) == ["x"]
    assert fingerprint(ops.scale) == a_set.found["function"]
    a_set.revert()


def test_a_module_imported_later_is_patched_and_given_back(ops):
    del sys.modules["fakeup.user"]
    a_set = PatchSet(patches())
    a_set.apply()
    user = import_module("fakeup.user")
    assert user.scale(1) == "patched scale 1"
    a_set.revert()
    assert user.scale(1) == "scale 1" and user.begin(ops.Wrapper(), 1) == "plan 1"


def test_an_alias_in_the_other_upstream_is_patched(ops, monkeypatch):
    backend = types.ModuleType("sglang.fake_backend")
    backend.scale = ops.scale
    stranger = types.ModuleType("stranger")
    stranger.scale = ops.scale
    monkeypatch.setitem(sys.modules, "sglang.fake_backend", backend)
    monkeypatch.setitem(sys.modules, "stranger", stranger)
    a_set = PatchSet([patch("function")])
    a_set.apply()
    assert backend.scale(1) == "patched scale 1" and stranger.scale(1) == "scale 1"
    a_set.revert()
    assert backend.scale(1) == "scale 1"


WRONG = {
    "fingerprint": (
        {"fingerprints": ("0" * 12,)},
        r"bad: fakeup\.ops:scale is \w{12}, reviewed 0{12}: install fakeup>=1.2,<1.3 or run",
    ),
    "version": ({"requires": "fakeup<1.2"}, "bad: fakeup is 1.2.3, needs fakeup<1.2"),
    "post_version": ({"requires": "fakeup==1.2"}, "bad: fakeup is 1.2.3, needs fakeup==1.2"),
    "not_installed": ({"requires": "fake-not-there<1"}, "fake-not-there is not installed"),
    "no_module": ({"target": "fakeup.gone:f"}, "fakeup.gone cannot be imported"),
    "no_function": ({"target": "fakeup.ops:gone"}, "fakeup.ops:gone is gone"),
    "no_class": ({"target": "fakeup.ops:Gone.f"}, "there is no class Gone"),
    "no_method": ({"target": "fakeup.ops:Wrapper.gone"}, "Wrapper.gone is gone"),
    "inherited": ({"target": "fakeup.ops:Child.plan"}, "is inherited, name the class"),
    "property": ({"target": "fakeup.ops:Wrapper.size"}, "is a property, only functions"),
    "class": ({"target": "fakeup.ops:Wrapper"}, "is a type, only functions"),
    "constant": ({"target": "fakeup.ops:REGISTRY"}, "is a dict, only functions"),
    "re_export": ({"target": "fakeup.user:scale"}, "is fakeup.ops.scale, not what its module"),
    "method_alias": (
        {"target": "fakeup.ops:Wrapper.begin_forward", "fingerprints": None},
        "is the object that method replaces",
    ),
    "wrap_raises": ({"wrap": lambda original: original.nothing}, "its wrap failed on fakeup.ops"),
    "wrap_returns_none": ({"wrap": lambda original: None}, "wrap must return a new function"),
    "wrap_returns_original": ({"wrap": lambda original: original}, "wrap must return a new"),
}


@pytest.mark.parametrize("case", WRONG)
def test_refusal_changes_nothing(ops, case):
    changes, message = WRONG[case]
    changes = {"target": TARGETS["function"], **changes}
    if "fingerprints" in changes and changes["fingerprints"] is None:
        changes["fingerprints"] = patch("method").fingerprints
    before = _bound(ops)
    others = [patch(n) for n in ("method", "static", "class")]
    a_set = PatchSet([*others, patch("bad", **changes)])
    with pytest.raises(PatchError, match=message):
        a_set.apply()
    assert not a_set.applied and _bound(ops) == before
    PatchSet([*others, patch("function")]).check()


def test_all_problems_are_told_at_once(ops):
    bad = [patch(n, fingerprints=("0" * 12,)) for n in ("method", "static", "class")]
    with pytest.raises(PatchError) as refusal:
        PatchSet([patch("function"), *bad]).check()
    assert [line.partition(":")[0] for line in str(refusal.value).splitlines()] == [
        "method",
        "static",
        "class",
    ]


def test_failed_install_is_undone(ops, monkeypatch):
    """The second binding cannot be written: the first is given back."""

    class Stubborn(types.ModuleType):
        def __setattr__(self, name, value):
            raise TypeError("read-only module")

    stubborn = Stubborn("fakeup.stubborn")
    vars(stubborn)["scale"] = ops.scale
    monkeypatch.setitem(sys.modules, "fakeup.stubborn", stubborn)
    before = _bound(ops)
    a_set = PatchSet([patch("method"), patch("function")])
    with pytest.raises(PatchError, match="cannot be rewritten .*read-only module"):
        a_set.apply()
    assert not a_set.applied and _bound(ops) == before
    monkeypatch.delitem(sys.modules, "fakeup.stubborn")
    a_set.apply()
    a_set.revert()


def test_a_binding_that_cannot_be_rewritten_is_refused(ops):
    frozen = import_module("fakeup.frozen")
    before = frozen.pair
    a_set = PatchSet([patch("method"), patch("pair", target="fakeup.frozen:pair")])
    with pytest.raises(PatchError, match=r"frozen:TABLE\[0\] holds fakeup.frozen:pair in a tuple"):
        a_set.apply()
    assert frozen.pair is before and ops.Wrapper().plan(1) == "plan 1"


def test_two_patches_on_one_target(ops):
    with pytest.raises(PatchError, match="two patches have the target fakeup.ops:scale"):
        PatchSet([patch("a", target=TARGETS["function"]), patch("b", target=TARGETS["function"])])
    with pytest.raises(PatchError, match="two patches have the name method"):
        PatchSet([patch("method"), patch("method", target=TARGETS["static"])])


def test_two_sets_on_one_target(ops):
    first, second = PatchSet([patch("function")]), PatchSet([patch("method"), patch("function")])
    first.apply()
    with pytest.raises(PatchError, match="fakeup.ops:scale is already replaced by function"):
        second.apply()
    assert ops.Wrapper().plan(1) == "plan 1" and ops.scale(1) == "patched scale 1"
    first.revert()
    second.apply()
    second.revert()
    assert wrong(patched=False) == []


def test_one_replacement_for_two_targets_is_refused(ops):
    def shared(*args):
        return None

    both = [patch(n, wrap=lambda original: shared) for n in ("function", "held")]
    with pytest.raises(PatchError, match="wrap must return a new function"):
        PatchSet(both).apply()
    assert wrong(patched=False) == []


def test_a_target_that_another_tool_wrapped_is_refused(ops, monkeypatch):
    """functools.wraps makes the source look right, so the source alone is not believed."""
    hooked = functools.wraps(ops.scale)(lambda x: ops.held(x))
    monkeypatch.setattr(ops, "scale", hooked)
    with pytest.raises(PatchError, match="something else replaced it"):
        PatchSet([patch("function")]).check()


def _break(ops, how, original):
    if how == "target":
        ops.scale = original
    elif how == "alias":
        import_module("fakeup.user").scale = original
    elif how == "registry":
        ops.REGISTRY["scale"] = original
    elif how == "new_alias":
        ops.another_name = original
    elif how == "other_function":
        ops.scale = lambda x: "third party"


BROKEN = {
    "target": "fakeup.ops:scale",
    "alias": "fakeup.user:scale",
    "registry": "fakeup.ops:REGISTRY['scale']",
    "new_alias": "fakeup.ops:another_name",
    "other_function": "fakeup.ops:scale",
}


@pytest.mark.parametrize("how", BROKEN)
def test_verify_finds_what_was_undone_behind_our_back(ops, how):
    original = ops.scale
    a_set = PatchSet(patches())
    a_set.apply()
    assert all(h.holds for h in a_set.verify())
    assert [h.site for h in a_set.verify() if h.patch.name == "method"] == [
        "fakeup.ops:Wrapper.plan",
        "fakeup.ops:Wrapper.begin_forward",
        "fakeup.ops:Other.start",
        "fakeup.user:begin",
    ]
    _break(ops, how, original)
    lost = [(h.patch.name, h.site) for h in a_set.verify() if not h.holds]
    assert lost == [("function", BROKEN[how])]
    a_set.revert()
    assert wrong(patched=False) == []


def test_verify_finds_a_reloaded_module(ops):
    a_set = PatchSet(patches())
    a_set.apply()
    sys.modules.pop("fakeup.ops")
    import_module("fakeup.ops")
    targets = [h for h in a_set.verify() if h.site in TARGETS.values()]
    assert len(targets) == len(TARGETS) and not any(h.holds for h in targets)
    a_set.revert()
