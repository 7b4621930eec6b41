"""The compiled library: where it goes, and what is said when it cannot be made."""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path

import pytest

from sgl_det.kernels import cpu_build, sealed


@pytest.fixture(scope="module")
def compiled():
    """The library as the compiler makes it, once: that takes some seconds."""
    return cpu_build._compile("gcc")


@pytest.fixture
def cache(tmp_path, monkeypatch, compiled):
    """A cache folder of its own, and a compiler that needs no time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_build, "_compile", lambda compiler: compiled)
    return tmp_path


def test_library_is_built_once(cache):
    first = cpu_build.build()
    assert first.parent == cache / "sgl_det"
    written = first.stat().st_mtime_ns
    assert cpu_build.build() == first and first.stat().st_mtime_ns == written
    assert [p.name for p in first.parent.iterdir()] == [first.name]


def test_no_compiler_is_one_sentence(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match="^the CPU kernels need a C compiler: .*install gcc$"):
        cpu_build.build()


def test_compiler_that_refuses_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_build, "_FLAGS", (*cpu_build._FLAGS, "-mno-fma"))
    with pytest.raises(RuntimeError, match="do not compile on this .*(fused multiply-add|fmadd)"):
        cpu_build.build()
    assert not (tmp_path / "sgl_det").exists()


@pytest.mark.parametrize("damage", ["cut short", "one bit"])
def test_a_damaged_library_is_compiled_anew(cache, caplog, damage):
    library = cpu_build.build()
    whole = library.read_bytes()
    half = len(whole) // 2
    flipped = whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :]
    library.write_bytes(whole[:half] if damage == "cut short" else flipped)
    with caplog.at_level(logging.WARNING, "sgl_det"):
        assert cpu_build.build() == library
    assert sealed.read(library) is not None and "compiled anew" in caplog.text
    ctypes.CDLL(str(library))  # the loader takes a sealed file


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_sentence(cache, monkeypatch):
    """What is written to /dev/full meets the error of a full disk."""
    full = lambda suffix, dir: (os.open("/dev/full", os.O_WRONLY), str(cache / "part"))  # noqa: E731
    monkeypatch.setattr(sealed.tempfile, "mkstemp", full)
    with pytest.raises(RuntimeError, match="^the cache folder .*No space left.*XDG_CACHE_HOME.*$"):
        cpu_build.build()


def test_a_cache_folder_that_is_a_file_is_one_sentence(cache):
    (cache / "sgl_det").write_text("")
    with pytest.raises(RuntimeError, match="^the cache folder .* cannot be written"):
        cpu_build.build()
