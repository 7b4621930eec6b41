"""Compiling by NVRTC: once a source and its options, and with the compiler's words in an error."""

from __future__ import annotations

import pytest

from sgl_det.kernels import nvrtc, sealed

TEXT = 'extern "C" __global__ void kernel(float *x) { *x = VALUE; }'


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A file of kernels, and a cache of its own."""
    (tmp_path / "kernel.cu").write_text(TEXT)
    monkeypatch.setattr(nvrtc, "SOURCES", tmp_path)
    monkeypatch.setattr(nvrtc, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "kernel.cu"


def images(source):
    return sorted((source.parent / "cache" / "cuda").iterdir())


def test_what_was_compiled_is_kept(source, monkeypatch):
    first = nvrtc.compiled(source.name, {"VALUE": 1}, "sm_90a")
    monkeypatch.setattr(nvrtc, "_compile", None)
    assert nvrtc.compiled(source.name, {"VALUE": 1}, "sm_90a") == first
    assert [sealed.read(x) for x in images(source)] == [first]


def test_a_damaged_image_is_compiled_anew(source):
    first = nvrtc.compiled(source.name, {"VALUE": 1}, "sm_90a")
    (kept,) = images(source)
    kept.write_bytes(kept.read_bytes()[:-100])
    assert nvrtc.compiled(source.name, {"VALUE": 1}, "sm_90a") == first
    assert sealed.read(kept) == first


def test_another_option_source_or_header_is_compiled_anew(source):
    nvrtc.compiled(source.name, {"VALUE": 1}, "sm_90a")
    nvrtc.compiled(source.name, {"VALUE": 2}, "sm_90a")
    nvrtc.compiled(source.name, {"VALUE": 1}, "sm_100a")
    source.write_text(TEXT + "\n")
    nvrtc.compiled(source.name, {"VALUE": 1}, "sm_90a")
    (source.parent / "more.cuh").write_text("")
    nvrtc.compiled(source.name, {"VALUE": 1}, "sm_90a")
    assert len(images(source)) == 5


def test_an_error_has_the_words_of_the_compiler(source):
    with pytest.raises(RuntimeError, match='kernel.cu does not compile: .*"VALUE" is undefined'):
        nvrtc.compiled(source.name, {}, "sm_90a")
    assert not (source.parent / "cache" / "cuda").exists()
