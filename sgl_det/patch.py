"""Patches: what is replaced upstream, in which versions, and why; applied as one transaction.

A `Patch` is data. A `PatchSet` checks every patch before it changes anything, rewrites every
binding of each target that it can find, and undoes its work in reverse. Bindings are found by
identity in the loaded modules of SGLang, FlashInfer and the targets' own packages: module globals
(also those of ``from x import f``), class attributes (also ``begin_forward = plan``), bound methods
of either, and the dicts and lists that are module globals or class attributes, at any depth.

No patch of this kind can reach a reference that was taken before ``apply()`` and is kept on an
instance (``self.run = f``), in a closure, in a default argument or in a ``functools.partial``, nor
kernels recorded in a CUDA graph. So apply before upstream's objects are made, and `PatchSet.verify`
in the process that serves, after the capture.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import FunctionType
from typing import NamedTuple

from packaging.requirements import InvalidRequirement, Requirement

from sgl_det.bindings import DESCRIPTORS, Site, bindings, current, function_of, rebound, resolve
from sgl_det.sources import Definition, definition_of, fingerprint, innermost, is_fingerprint

__all__ = ["Held", "Patch", "PatchError", "PatchSet", "fingerprint"]

UPSTREAM = frozenset({"sglang", "flashinfer"})
_BOUNDED = frozenset({"<", "<=", "==", "===", "~="})


class PatchError(RuntimeError):
    """Patches do not fit this upstream, one problem a line; nothing was changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One upstream function that is replaced. Raises ValueError if a field is malformed."""

    name: str  # "triton.decode.fixed_split_size"
    target: str  # "package.module:Class.method", where the function is defined
    requires: str  # PEP 508 with an upper bound: "sglang>=0.5.17,<0.5.18"
    fingerprints: tuple[str, ...]  # upstream sources that a person has reviewed
    why: str  # one sentence: which reduction order it pins
    upstream: str  # issue or pull request whose merge removes this patch; "none: <reason>"
    wrap: Callable[[Callable], Callable]  # original -> a new replacement

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.]+:[A-Za-z_][\w.]*", self.target):
            raise ValueError(
                f"{self.name}: target {self.target!r} is not 'package.module:qualname'"
            )
        if not self.fingerprints or not all(map(is_fingerprint, self.fingerprints)):
            raise ValueError(f"{self.name}: fingerprints must be 12 hex digits, and at least one")
        if not (self.name and self.why and self.upstream):
            raise ValueError(f"{self.name or self.target}: name, why and upstream must be given")
        try:
            operators = {s.operator for s in Requirement(self.requires).specifier}
        except InvalidRequirement as error:
            raise ValueError(f"{self.name}: requires {self.requires!r} is malformed") from error
        if not operators & _BOUNDED:
            raise ValueError(f"{self.name}: requires {self.requires!r} has no upper bound")

    @property
    def distribution(self) -> str:
        return Requirement(self.requires).name

    def accepts(self, found: str) -> bool:
        """Whether version ``found`` of the distribution is inside the range."""
        return Requirement(self.requires).specifier.contains(found, prereleases=True)


class Held(NamedTuple):
    """One binding that a patch is responsible for, and whether it is our replacement now."""

    patch: Patch
    site: str
    holds: bool


class _Change(NamedTuple):
    """What one patch does to one object: both forms, as bound in a class and as a function."""

    patch: Patch
    old: object
    new: object

    def pairs(self) -> dict[int, object]:
        """id of each form of the original -> the same form of the replacement."""
        return {id(self.old): self.new, id(function_of(self.old)): function_of(self.new)}


class _Done(NamedTuple):
    patch: Patch
    site: Site  # its value is what was there before
    new: object


# The replacements that are in place in this process, over all sets: id -> patch.
_active: dict[int, Patch] = {}


class PatchSet:
    """Patches that are applied and reverted together. Raises PatchError on two of one target."""

    def __init__(self, patches: Iterable[Patch]) -> None:
        self.patches = tuple(patches)
        self.found: dict[str, str] = {}  # patch name -> fingerprint, once applied
        self._changes: list[_Change] = []
        self._undo: list[_Done] = []
        for field in ("target", "name"):
            values = [getattr(p, field) for p in self.patches]
            twice = sorted({v for v in values if values.count(v) > 1})
            if twice:
                raise PatchError(f"two patches have the {field} {', '.join(twice)}: keep one")

    @property
    def applied(self) -> bool:
        return bool(self._changes)

    def check(self) -> None:
        """Raise one PatchError with every problem; imports the targets, changes nothing."""
        if not self.applied:
            self._check()

    def _check(self) -> list[tuple[Site, str]]:
        results, problems, owners = [], [], {}
        for patch in self.patches:
            try:
                site, seen = _check(patch)
                first = owners.setdefault(id(function_of(site.value)), patch)
                if first is not patch:
                    raise PatchError(
                        f"{patch.name}: {patch.target} is the object that {first.name} replaces: "
                        "keep one"
                    )
                results.append((site, seen))
            except PatchError as error:
                problems.append(str(error))
        if problems:
            raise PatchError("\n".join(problems))
        return results

    def apply(self) -> None:
        """Replace every target, or raise PatchError and leave all as it was. Twice is once."""
        if self.applied:
            return
        checked = self._check()
        changes = [_make(p, s.value) for p, (s, _) in zip(self.patches, checked, strict=True)]
        news = [id(function_of(c.new)) for c in changes]
        for change in changes:
            if news.count(id(function_of(change.new))) > 1:
                raise PatchError(f"{change.patch.name}: wrap must return a new function")
        try:
            self._changes = changes
            self._install([site for site, _ in checked])
        except BaseException as error:
            self.revert()
            if isinstance(error, PatchError) or not isinstance(error, Exception):
                raise
            raise PatchError(f"a binding cannot be rewritten ({error!r})") from error
        self.found = {p.name: seen for p, (_, seen) in zip(self.patches, checked, strict=True)}

    def _install(self, targets: list[Site]) -> None:
        by_id = {i: (c, new) for c in self._changes for i, new in c.pairs().items()}
        # Everything is found before anything is written: writing would hide later aliases.
        sites = {(id(s.owner), s.key): s for s in (*targets, *bindings(by_id, self._packages()))}
        for site in sites.values():
            change, new = by_id[site.match]
            if site.frozen:
                kind = type(site.owner).__name__
                raise PatchError(
                    f"{change.patch.name}: {site.label} holds {change.patch.target} in a {kind}, "
                    "which cannot be rewritten: patch what reads it instead"
                )
            new = rebound(site.value, new)
            self._undo.append(_Done(change.patch, site, new))
            site.set(new)
        for patch, _, new in self._changes:
            _active.update(dict.fromkeys((id(new), id(function_of(new))), patch))

    def revert(self) -> None:
        """Put every original back, in reverse; also where a module took a replacement later."""
        while self._undo:
            done = self._undo.pop()
            now = done.site.get()
            # An entry of a list may have moved or gone; the search below finds it where it is.
            if now is done.new or not (done.site.is_item or now is done.site.value):
                done.site.set(done.site.value)
        backwards = [_Change(patch, new, old) for patch, old, new in self._changes]
        by_id = {i: old for change in backwards for i, old in change.pairs().items()}
        for site in list(bindings(by_id, self._packages())) if by_id else ():
            if not site.frozen:
                site.set(rebound(site.value, by_id[site.match]))
        for i in by_id:
            _active.pop(i, None)
        self._changes, self.found = [], {}

    def verify(self) -> list[Held]:
        """Whether each target, and each binding that was rewritten, is our replacement now.

        Also lists, as not held, bindings of an original that came into being after ``apply()``.
        The first entry of each patch is its target, resolved afresh (so a reload is seen).
        """
        if not self.applied:
            return [Held(p, p.target, False) for p in self.patches]
        held = [Held(p, p.target, current(p.target) is new) for p, _, new in self._changes]
        held += [
            Held(d.patch, d.site.label, d.site.get() is d.new)
            for d in self._undo
            if d.site.label != d.patch.target
        ]
        originals = {i: c.patch for c in self._changes for i in c.pairs()}
        known = {(h.patch.name, h.site) for h in held}
        for site in bindings(originals, self._packages()):
            patch = originals[site.match]
            if (patch.name, site.label) not in known:
                held.append(Held(patch, site.label, False))
        order = {p.name: i for i, p in enumerate(self.patches)}
        return sorted(held, key=lambda h: order[h.patch.name])

    def _packages(self) -> frozenset[str]:
        return UPSTREAM | {re.split(r"[.:]", p.target)[0] for p in self.patches}


def _check(patch: Patch) -> tuple[Site, str]:
    """Where the target is bound and its fingerprint, or PatchError; imports the target's module."""
    way_out = f"install {patch.requires} or run `sgl-det check`"
    needs = f"needs {patch.requires}: {way_out}"
    try:
        found = version(patch.distribution)
    except PackageNotFoundError:
        problem = f"{patch.name}: {patch.distribution} is not installed, {needs}"
        raise PatchError(problem) from None
    if not patch.accepts(found):
        raise PatchError(f"{patch.name}: {patch.distribution} is {found}, {needs}")
    try:
        site = resolve(patch.target)
        definition = _examine(site)
    except (LookupError, PatchError, ValueError) as error:
        raise PatchError(f"{patch.name}: {error.args[0]}: {way_out}") from error
    if definition.fingerprint not in patch.fingerprints:
        raise PatchError(
            f"{patch.name}: {patch.target} is {definition.fingerprint}, "
            f"reviewed {', '.join(patch.fingerprints)}: {way_out}"
        )
    return site, definition.fingerprint


def _examine(site: Site) -> Definition:
    """The definition behind a target, or PatchError if something else is bound there."""
    value, target = site.value, site.label
    if id(value) in _active:
        raise PatchError(f"{target} is already replaced by {_active[id(value)].name}")
    outer = function_of(value)
    inner = innermost(outer)
    if isinstance(value, type) or not callable(outer) or not isinstance(inner, FunctionType):
        raise PatchError(f"{target} is a {type(value).__name__}, only functions can be replaced")
    definition = definition_of(inner)
    bare = set(definition.decorators) <= {d.__name__ for d in DESCRIPTORS}
    if inner.__module__ != target.partition(":")[0] or (bare and inner is not outer):
        raise PatchError(
            f"{target} is {outer.__module__}.{outer.__qualname__}, not what its module defines: "
            "something else replaced it, or it is defined elsewhere"
        )
    return definition


def _make(patch: Patch, original: object) -> _Change:
    """The replacement, of the same kind of descriptor as the original."""
    function = function_of(original)
    try:
        replacement = patch.wrap(function)
    except Exception as error:
        raise PatchError(f"{patch.name}: its wrap failed on {patch.target}: {error!r}") from error
    if not callable(replacement) or replacement is function or id(replacement) in _active:
        raise PatchError(f"{patch.name}: wrap must return a new function, found {replacement!r}")
    if isinstance(replacement, FunctionType):
        functools.update_wrapper(replacement, function, updated=())
        for key, value in getattr(function, "__dict__", {}).items():
            # Dynamo would follow its own marks from the replacement back to the original.
            if key != "__wrapped__" and not key.startswith("_torchdynamo"):
                replacement.__dict__.setdefault(key, value)
    if isinstance(original, DESCRIPTORS):
        replacement = type(original)(replacement)
    return _Change(patch, original, replacement)
