"""A page of memory in which a worker leaves a sentence: why it, or its every claim, ended.

The launcher makes it and reads it at no cost, also where the worker no longer answers. It is no
file on any disk, and goes with the launcher's process.
"""

from __future__ import annotations

import mmap
import os

_BYTES = mmap.PAGESIZE
_EACH = _BYTES // 2
# Where each kind of sentence begins.
_AT = {"problem": 0, "failure": _EACH}


class Board:
    """The page, shared by the processes that have opened the same path. Linux only.

    It has room for two kinds of sentence: a "problem" ends the claims, a "failure" the process.
    """

    def __init__(self, handle: int) -> None:
        self._page = mmap.mmap(handle, _BYTES)

    def write(self, kind: str, sentence: str) -> None:
        """Leave a sentence, unless one is there: the first is the cause of the others."""
        if not self.read(kind):
            text, at = sentence.encode()[: _EACH - 1], _AT[kind]
            self._page[at : at + len(text)] = text

    def read(self, kind: str) -> str:
        """The sentence of a kind, or ""."""
        at = _AT[kind]
        return self._page[at : at + _EACH].partition(b"\0")[0].decode(errors="replace")


def create() -> tuple[Board, str]:
    """A new board, and the path at which this process's children find it."""
    handle = os.memfd_create("sgl_det-board")
    os.truncate(handle, _BYTES)
    return Board(handle), f"/proc/{os.getpid()}/fd/{handle}"


def at(path: str) -> Board:
    """The board of another process. Raises OSError if that process has ended."""
    handle = os.open(path, os.O_RDWR)
    try:
        return Board(handle)
    finally:
        os.close(handle)
