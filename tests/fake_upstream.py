"""The patches of the fake upstream, what they should change, and a run through their life cycle.

``python fake_upstream.py STEP ...`` runs the steps (import, apply, revert) in the given order and
exits 1 if after any of them some binding is not what the last apply or revert says.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from sgl_det.patch import Patch, PatchSet
from sgl_det.sources import installed

SITE = Path(__file__).with_name("patches") / "site"

TARGETS = {
    "function": "fakeup.ops:scale",
    "cached": "fakeup.ops:cached",
    "decorated": "fakeup.ops:decorated",
    "method": "fakeup.ops:Wrapper.plan",
    "static": "fakeup.ops:Wrapper.shift",
    "class": "fakeup.ops:Wrapper.make",
    "inner": "fakeup.ops:Wrapper.Inner.plan",
    "held": "fakeup.ops:held",
}

# How a user of the upstream reaches each binding: expression over the modules -> unpatched answer.
CALLS = {
    "ops.scale(1)": "scale 1",
    "ops.cached(1)": "cached 1",
    "ops.decorated(1)": "decorated 1",
    "ops.Wrapper().plan(1)": "plan 1",
    "ops.Wrapper().begin_forward(1)": "plan 1",
    "ops.Child().plan(1)": "plan 1",
    "ops.Other().start(1)": "plan 1",
    "ops.Wrapper.shift(1)": "shift 1",
    "ops.Wrapper().shift(1)": "shift 1",
    "ops.Wrapper.make(1)": "make Wrapper 1",
    "ops.Child.make(1)": "make Child 1",
    "ops.make_default(1)": "make Wrapper 1",
    "ops.Wrapper.Inner().plan(1)": "inner 1",
    "ops.REGISTRY['scale'](1)": "scale 1",
    "ops.REGISTRY['nested']['shift'](1)": "shift 1",
    "ops.STAGES[0](1)": "held 1",
    "ops.STAGES[1](1)": "scale 1",
    "user.scale(1)": "scale 1",
    "user.cached(1)": "cached 1",
    "user.decorated(1)": "decorated 1",
    "user.begin(ops.Wrapper(), 1)": "plan 1",
}


def marked(original):
    """A replacement that shows in the answer that it ran."""
    return lambda *args: f"patched {original(*args)}"


def patch(name: str, **changes) -> Patch:
    """One patch of the fake upstream; its fingerprint is read from the file, without an import."""
    target = changes.get("target", TARGETS.get(name))
    if "fingerprints" not in changes:
        found = installed("fakeup", "fakeup").definitions(target)
        changes["fingerprints"] = tuple(d.fingerprint for d in found) or ("0" * 12,)
    fields = {"requires": "fakeup>=1.2,<1.3", "why": "a test", "upstream": "none: a test"}
    return Patch(name=name, **{"target": target, "wrap": marked, **fields, **changes})


def patches() -> list[Patch]:
    return [patch(name) for name in TARGETS]


def wrong(patched: bool) -> list[str]:
    """The calls whose answer is not the patched (or the original) one; imports everything."""
    modules = {name: import_module(f"fakeup.{name}") for name in ("ops", "user")}
    prefix = "patched " if patched else ""
    answers = {call: eval(call, dict(modules)) for call in CALLS}
    return [f"{c} is {a!r}" for c, a in answers.items() if a != prefix + CALLS[c]]


def run(steps: list[str]) -> list[str]:
    """What was wrong after which of the steps."""
    problems, applied = [], False
    patch_set = PatchSet(patches())
    imported = False
    for i, step in enumerate(steps):
        if step == "import":
            import_module("fakeup.user")
            imported = True
        else:
            getattr(patch_set, step)()
            applied = step == "apply"
        if imported:
            problems += [f"{i} {step}: {w}" for w in wrong(applied)]
        lost = [h.site for h in patch_set.verify() if h.holds != applied]
        problems += [f"{i} {step}: verify says {site} {not applied}" for site in lost]
    return problems


if __name__ == "__main__":
    sys.path.insert(0, str(SITE))
    found = run(sys.argv[1:])
    sys.exit("\n".join(found) or 0)
