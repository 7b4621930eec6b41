"""Kernel names as rules write them: without return type, parameters and a demangler's blanks."""

from __future__ import annotations


def canonical(name: str) -> str:
    """``void f<A<int> >(float*)`` -> ``f<A<int>>``. Names of copies and of Triton stay as they are.

    The parameters of a C++ kernel repeat its template arguments, so nothing that tells two kernels
    apart is lost.
    """
    name = name.strip().removeprefix("void ")
    return squeeze(name[: _end(name)])


def squeeze(text: str) -> str:
    """Closing brackets without the blanks that some demanglers put between them."""
    while "> >" in text:
        text = text.replace("> >", ">>")
    return text


def _end(name: str) -> int:
    """Where the parameter list starts; the length if there is none."""
    if not name.endswith(")"):
        return len(name)
    depth = 0
    for i in range(len(name) - 1, 0, -1):
        depth += (name[i] == ")") - (name[i] == "(")
        if depth == 0:
            # "Memcpy DtoH (Device -> Pinned)" is a name of the profiler's, not of C++.
            return len(name) if name[i - 1] == " " else i
    return len(name)
