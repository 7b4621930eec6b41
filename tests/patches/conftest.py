"""The fake upstream, imported afresh for each test."""

from __future__ import annotations

import sys
from importlib import import_module, invalidate_caches

import pytest

from fake_upstream import SITE


def _unload():
    for name in [n for n in sys.modules if n.partition(".")[0] == "fakeup"]:
        del sys.modules[name]


@pytest.fixture
def ops(monkeypatch):
    """The fake upstream's module, freshly imported, with a second module that aliases it."""
    monkeypatch.syspath_prepend(str(SITE))
    invalidate_caches()
    _unload()
    import_module("fakeup.user")
    yield import_module("fakeup.ops")
    _unload()
