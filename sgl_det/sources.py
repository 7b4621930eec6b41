"""Upstream's functions as source text: in this process, on disk, or in a wheel.

Files are parsed, never imported. One function is named by the digits of its text, decorators
included, so it has the same name wherever it is read from.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import re
import zipfile
from collections.abc import Callable
from email.parser import HeaderParser
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import NamedTuple

_DEFS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Definition(NamedTuple):
    """One ``def``: its fingerprint and the source text of its decorators."""

    fingerprint: str
    decorators: tuple[str, ...]


def fingerprint(source: object) -> str:
    """12 hex digits that name a function's source, decorators included.

    ``source`` is the text of one ``def``, at any indentation, or the function itself (also wrapped,
    static or a class method). Raises ValueError if there is no such source.
    """
    return (_of_text(source) if isinstance(source, str) else definition_of(source)).fingerprint


def is_fingerprint(text: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{12}", text) is not None


def innermost(function: object) -> object:
    """The function under static and class methods, ``functools.wraps`` and ``triton.jit``."""
    if isinstance(function, (staticmethod, classmethod)):
        function = function.__func__
    function = inspect.unwrap(function)
    while not isinstance(function, FunctionType) and isinstance(
        getattr(function, "fn", None), (FunctionType, type(function))
    ):
        function = function.fn
    return function


def definition_of(function: object) -> Definition:
    """The definition of a function of this process. Raises ValueError if it has no source."""
    function = innermost(function)
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError) as error:
        raise ValueError(f"{function!r} has no readable source") from error
    return _of_text(text)


def _of_text(text: str) -> Definition:
    indented = text[:1].isspace()
    try:
        node = ast.parse(f"if 1:\n{text}" if indented else text).body[0]
    except (SyntaxError, IndexError) as error:
        raise ValueError(f"not the source of one function: {text[:60]!r}") from error
    node = node.body[0] if indented else node
    if not isinstance(node, _DEFS):
        raise ValueError(f"not the source of one function: {text[:60]!r}")
    return _of_node(node, ["", *text.split("\n")] if indented else text.split("\n"))


def _of_node(node: ast.FunctionDef, lines: list[str]) -> Definition:
    # Cut by the syntax tree: inspect also returns comments that trail the body.
    first = min(n.lineno for n in (node, *node.decorator_list))
    lines = lines[first - 1 : node.end_lineno]
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    text = "\n".join(line.removeprefix(indent).rstrip() for line in lines)
    digits = hashlib.sha256(text.encode()).hexdigest()[:12]
    return Definition(digits, tuple(map(ast.unparse, node.decorator_list)))


class Source(NamedTuple):
    """One distribution whose files can be read: an installed one, a wheel, or an unpacked wheel."""

    distribution: str
    version: str
    read: Callable[[str], str | None]  # "sglang/srt/utils.py" -> its text, None if there is none

    def definitions(self, target: str) -> list[Definition]:
        """What "package.module:Class.attr" may be once imported; [] if nothing defines it.

        More than one where branches (``if``, ``try``) define it differently. Raises ValueError if
        the file does not parse.
        """
        module, _, path = target.partition(":")
        stem = module.replace(".", "/")
        text = self.read(f"{stem}.py")
        text = self.read(f"{stem}/__init__.py") if text is None else text
        if text is None:
            return []
        try:
            scopes = [_parsed(text)]
        except SyntaxError as error:
            raise ValueError(f"{module} of {self.distribution} does not parse: {error}") from error
        for part in path.split("."):
            # What a function defines is not reachable by name, so only classes are entered.
            entered = [s for s in scopes if not isinstance(s, _DEFS)]
            scopes = [node for scope in entered for node in _bound(scope.body, part)]
        lines = text.split("\n")
        return [_of_node(node, lines) for node in scopes if isinstance(node, _DEFS)]


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def _bound(body: list[ast.stmt], name: str) -> list[ast.stmt]:
    """The statements of ``body`` that may have bound ``name`` last, if a def or class did."""
    found: list[ast.stmt] = []
    for node in body:
        if isinstance(node, (*_DEFS, ast.ClassDef)):
            found = [node] if node.name == name else found
        elif isinstance(node, ast.With):
            found = _bound(node.body, name) or found
        elif isinstance(node, ast.If):
            branches = [_bound(node.body, name), _bound(node.orelse, name)]
            found = [*([] if all(branches) else found), *branches[0], *branches[1]]
        elif isinstance(node, ast.Try):
            blocks = [node.body, *(h.body for h in node.handlers), node.orelse, node.finalbody]
            found = [*found, *(n for block in blocks for n in _bound(block, name))]
    return found


def installed(name: str, package: str) -> Source | None:
    """The installed distribution that provides ``package``, or None. Nothing is imported."""
    try:
        found, spec = version(name), find_spec(package)
    except PackageNotFoundError:
        return None
    roots = (spec and spec.submodule_search_locations) or ()

    def read(path: str) -> str | None:
        inside = path.partition("/")[2]
        return next((t for root in roots if (t := _text(Path(root) / inside)) is not None), None)

    return Source(name, found, read)


def wheel(path: Path) -> Source:
    """A wheel, or a folder that one was unpacked into. Raises ValueError if it is neither."""
    if path.is_dir():
        names = sorted(p.parent.name for p in path.glob("*.dist-info/METADATA"))
        if len(names) != 1:
            raise ValueError(f"{path} has {len(names)} *.dist-info folders, expected one")
        return _described(f"{names[0]}/METADATA", lambda name: _text(path / name))
    try:
        archive = zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a wheel ({error})") from error
    members = set(archive.namelist())
    metadata = [n for n in members if re.fullmatch(r"[^/]+\.dist-info/METADATA", n)]
    if len(metadata) != 1:
        raise ValueError(f"{path} is a zip file without a wheel's METADATA")

    def read(name: str) -> str | None:
        return _decoded(archive.read(name)) if name in members else None

    return _described(metadata[0], read)


def _described(metadata: str, read: Callable[[str], str | None]) -> Source:
    fields = HeaderParser().parsestr(read(metadata) or "")
    if not (fields["Name"] and fields["Version"]):
        raise ValueError(f"{metadata} gives no name and version")
    return Source(fields["Name"], fields["Version"], read)


def _text(path: Path) -> str | None:
    return _decoded(path.read_bytes()) if path.is_file() else None


def _decoded(raw: bytes) -> str:
    return raw.decode("utf-8-sig", errors="replace").replace("\r\n", "\n")
