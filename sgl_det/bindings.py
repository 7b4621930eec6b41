"""Where loaded modules bind an object: found by identity, without running any code of theirs."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Container, Iterator
from types import MethodType, ModuleType
from typing import NamedTuple

DESCRIPTORS = (staticmethod, classmethod)


class Site(NamedTuple):
    """One binding: ``owner`` is a module or class, or a container that one of them holds."""

    owner: object
    key: object
    label: str  # "package.module:Class.attr" or "package.module:REGISTRY['key']"
    value: object  # what was bound when the site was found
    match: int  # id of the object that was looked for: the value, or the function of a method

    @property
    def is_item(self) -> bool:
        return isinstance(self.owner, (dict, list))

    @property
    def frozen(self) -> bool:
        """Whether the binding cannot be rewritten."""
        return isinstance(self.owner, (tuple, functools.partial))

    def get(self) -> object:
        """What is bound now, or None."""
        if isinstance(self.owner, list):
            return self.owner[self.key] if self.key < len(self.owner) else None
        return (self.owner if self.is_item else namespace(self.owner)).get(self.key)

    def set(self, value: object) -> None:
        if self.is_item:
            self.owner[self.key] = value
        else:
            setattr(self.owner, self.key, value)


def namespace(owner: object) -> dict[str, object]:
    """The owner's own names. Unlike ``vars()`` it does not load a lazy module."""
    if isinstance(owner, type):
        return type.__dict__["__dict__"].__get__(owner)
    return object.__getattribute__(owner, "__dict__")


def function_of(value: object) -> object:
    """The function inside a static or class method; anything else as it is."""
    return value.__func__ if isinstance(value, DESCRIPTORS) else value


def resolve(target: str) -> Site:
    """The binding that "package.module:Class.attr" names, in its owner's own namespace.

    Imports the module. Raises LookupError with a sentence if there is no such binding.
    """
    module_name, _, path = target.partition(":")
    try:
        owner = importlib.import_module(module_name)
    except Exception as error:  # upstream's import may fail in any way, and every way is a refusal
        raise LookupError(f"{module_name} cannot be imported ({error!r})") from error
    *parents, attr = path.split(".")
    for part in parents:
        owner = namespace(owner).get(part)
        if not isinstance(owner, type):
            raise LookupError(f"{target} is gone, there is no class {part}")
    if attr not in namespace(owner):
        inherited = isinstance(owner, type) and hasattr(owner, attr)
        why = "is inherited, name the class that defines it" if inherited else "is gone"
        raise LookupError(f"{target} {why}")
    value = namespace(owner)[attr]
    return Site(owner, attr, target, value, id(value))


def current(target: str) -> object:
    """What is bound at the target now, or None."""
    try:
        return resolve(target).value
    except LookupError:
        return None


def rebound(value: object, new: object) -> object:
    """``new``, bound as ``value`` was if that is a bound method."""
    return MethodType(new, value.__self__) if type(value) is MethodType else new


def bindings(wanted: Container[int], packages: Container[str]) -> Iterator[Site]:
    """Every binding, in the loaded modules of ``packages``, of an object whose id is wanted."""
    seen: set[int] = set()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in packages and issubclass(type(module), ModuleType):
            yield from _walk(module, f"{name}:", wanted, packages, seen)


def _walk(owner, label, wanted, packages, seen) -> Iterator[Site]:
    if id(owner) in seen:
        return
    seen.add(id(owner))
    dot = "" if label.endswith(":") else "."
    for key, value in _items(owner):
        name = f"{label}[{key!r}]" if isinstance(owner, _CONTAINERS) else f"{label}{dot}{key}"
        match = id(value)
        if type(value) is MethodType:
            match = id(value.__func__)
        if match in wanted:
            yield Site(owner, key, name, value, match)
        elif issubclass(type(value), _CONTAINERS) or _is_class_of(value, packages):
            yield from _walk(value, name, wanted, packages, seen)


_CONTAINERS = (dict, list, tuple, functools.partial)


def _items(owner) -> list[tuple[object, object]]:
    kind = type(owner)
    if issubclass(kind, dict):
        return list(dict.items(owner))
    if issubclass(kind, (list, tuple)):
        return list(enumerate(owner))
    if issubclass(kind, functools.partial):
        return list(enumerate((owner.func, *owner.args)))
    return [(k, v) for k, v in list(namespace(owner).items()) if k != "__builtins__"]


def _is_class_of(value: object, packages: Container[str]) -> bool:
    if not issubclass(type(value), type):
        return False
    module = namespace(value).get("__module__")
    return isinstance(module, str) and module.partition(".")[0] in packages
