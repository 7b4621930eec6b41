"""The compiled library: where it goes, and what is said when it cannot be made."""

from __future__ import annotations

import pytest

from sgl_det.kernels import cpu_build


def test_library_is_built_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = cpu_build.build()
    assert first.parent == tmp_path / "sgl_det"
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
    with pytest.raises(RuntimeError, match="no fused multiply-add"):
        cpu_build.build()
    assert not list((tmp_path / "sgl_det").iterdir())
