"""The copy of FlashInfer's headers: what is changed, what is refused, and what compiles from it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from sgl_det.kernels.flashinfer_headers import (
    EDITS,
    EXACT_RESCALE,
    ONE_TREE,
    HeaderError,
    digits,
    edited,
    fingerprint,
    function_text,
    patched_copy,
    with_headers,
)

from . import flashinfer_build
from .flashinfer_build import include_folder

PREFILL = "flashinfer/attention/prefill.cuh"
SOURCE = "int f(int);\n\nint f(int a) {\n  return g(a) + 1;\n}\n\nint g(int a) { return f(a); }\n"
needs_headers = pytest.mark.skipif(not include_folder(), reason="needs FlashInfer's headers")


def edit_of(text: str):
    f = fingerprint(function_text(text, "f"))
    changes = {"file": "a.cuh", "function": "f", "fingerprint": f}
    return replace(EDITS[0], name="e", old="+ 1", new="+ 2", **changes)


def test_one_place_changes_and_no_other():
    assert edited({"a.cuh": SOURCE}, [edit_of(SOURCE)])["a.cuh"] == SOURCE.replace("+ 1", "+ 2")


@pytest.mark.parametrize(
    "text, says",
    [
        (SOURCE.replace("g(a) + 1", "g(a) + 1 + 1"), "found [0-9a-f]{12}, expected [0-9a-f]{12}"),
        (SOURCE.replace("int f", "int h"), "0 definitions of f, expected one definition"),
        (SOURCE + SOURCE, "2 definitions of f, expected one definition"),
    ],
    ids=["changed", "gone", "twice"],
)
def test_header_that_was_not_reviewed_is_refused(text, says):
    with pytest.raises(HeaderError, match=f"^e: f in a.cuh: found .*{says[6:]}: install flashinf"):
        edited({"a.cuh": text}, [edit_of(SOURCE)])


@pytest.mark.parametrize("count, text", [(0, "- 1"), (2, "+ 1 + 1")])
def test_line_must_be_there_once(count, text):
    source = SOURCE.replace("+ 1", text)
    with pytest.raises(HeaderError, match=f"its line {count} times, expected once"):
        edited({"a.cuh": source}, [edit_of(source)])


def test_headers_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(HeaderError, match="prefill.cuh is missing: expected FlashInfer's headers"):
        patched_copy(tmp_path, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@needs_headers
def test_copy_differs_from_the_installed_headers_in_these_lines_only(tmp_path):
    include = include_folder()
    copy = patched_copy(include, tmp_path)
    assert patched_copy(include, tmp_path) == copy and [*tmp_path.iterdir()] == [copy]
    names = {p.relative_to(include) for p in include.rglob("*") if p.is_file()}
    assert names == {p.relative_to(copy) for p in copy.rglob("*") if p.is_file()}
    differ = {n for n in names if (include / n).read_bytes() != (copy / n).read_bytes()}
    assert differ == {Path(PREFILL)}
    before, after = ((f / PREFILL).read_text().splitlines() for f in (include, copy))
    lines = [x for x in difflib.ndiff(before, after) if x[:2] in ("- ", "+ ")]
    removed = [x for x in lines if x[0] == "-"]
    assert len(removed) == sum(e.old.count("\n") + 1 for e in EDITS)
    assert len(lines) - len(removed) == sum(e.new.count("\n") + 1 for e in EDITS)


@needs_headers
def test_other_edits_or_headers_give_another_folder(tmp_path):
    copies = {patched_copy(include_folder(), tmp_path, e) for e in (EXACT_RESCALE, ONE_TREE, EDITS)}
    assert len(copies) == len({digits(e) for e in (EXACT_RESCALE, ONE_TREE, EDITS)}) == 3


@dataclass
class Spec:
    name: str = "batch_prefill"
    extra_include_dirs: list[Path] | None = None


def test_module_gets_a_name_and_a_folder_of_its_own(tmp_path):
    copy, spec = tmp_path / "flashinfer-headers-0123456789ab", Spec()
    made = with_headers(spec, copy)
    assert made == Spec("batch_prefill_0123456789ab", [copy]) and spec == Spec()
    other = with_headers(Spec(extra_include_dirs=[tmp_path]), copy)
    assert other.extra_include_dirs == [copy, tmp_path]
    with pytest.raises(HeaderError, match="build specification is None"):
        with_headers(None, copy)


@needs_headers
def test_installed_build_searches_the_copy_first(tmp_path, monkeypatch):
    """In the compiler command that FlashInfer writes, whatever else it searches."""
    cpp_ext = pytest.importorskip("flashinfer.jit.cpp_ext")
    core = pytest.importorskip("flashinfer.jit.core")
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    monkeypatch.setattr(cpp_ext, "get_cuda_path", lambda: "/cuda")
    monkeypatch.setattr(cpp_ext, "get_cuda_version", lambda: cpp_ext.Version("13.0"))
    copy = tmp_path / "flashinfer-headers-0123456789ab"
    sources = [tmp_path / "a.cu"]
    spec = core.JitSpec("a", sources, None, None, None, None)
    made = with_headers(spec, copy)
    assert not made.is_aot and made.jit_library_path.name == "a_0123456789ab.so"
    text = cpp_ext.generate_ninja_build_for_op(
        made.name, made.sources, None, None, None, made.extra_include_dirs
    )
    assert text.index(f"-I{copy.resolve()}") < text.index(f"-isystem {include_folder().resolve()}")
    assert str(made.build_dir.resolve()) in text and "/cached_ops/a/" not in text


needs_nvcc = pytest.mark.skipif(not flashinfer_build.available(), reason="needs nvcc")


@pytest.mark.long
@needs_headers
@needs_nvcc
def test_tiles_of_16_64_and_128_rows_do_the_same_work_a_row(tmp_path):
    """Opcode counts: equal for one group of rows a warp, double for two."""
    copy = patched_copy(include_folder(), tmp_path)
    counts = flashinfer_build.opcodes(copy, tmp_path, (64, 128))
    assert set(counts) == {(d, t) for d in (64, 128) for t in (16, 64, 128)}
    for dim, matrix in ((64, 68), (128, 132)):
        one, four, two = (counts[dim, tile] for tile in (16, 64, 128))
        assert (one["HMMA"], one["MUFU.EX2"], one["FFMA"], one["FADD"]) == (matrix, 34, 32, 4)
        for op in ("HMMA", "MUFU.EX2", "MUFU.LG2", "FFMA", "FADD", "FMNMX", "FSEL", "SHFL"):
            assert one[op] == four[op] and 2 * one[op] == two[op], (dim, op)
        # The product of the scale with log2(e) is taken once a thread, whatever its rows.
        assert one["FMUL"] == four["FMUL"] and 2 * one["FMUL"] - 1 == two["FMUL"]


@pytest.mark.long
@needs_headers
@needs_nvcc
def test_rescale_is_exact_with_the_edit_alone_and_not_without(tmp_path):
    """Two of the 34 exponents: a difference and a product, where there was one FMA."""
    with_it = patched_copy(include_folder(), tmp_path, EXACT_RESCALE)
    edited_counts = flashinfer_build.opcodes(with_it, tmp_path, (64,))
    stock = flashinfer_build.opcodes(include_folder(), tmp_path, (64,))
    for tile, rows in ((16, 1), (64, 1), (128, 2)):
        now, before = edited_counts[64, tile], stock[64, tile]
        assert now["MUFU.EX2"] == before["MUFU.EX2"] == 34 * rows
        assert now["FFMA"] == 32 * rows and before["FFMA"] == 34 * rows


@pytest.mark.long
@needs_headers
@needs_nvcc
def test_dispatch_takes_one_kv_tile_of_64_keys(tmp_path):
    """FlashInfer's own choice, asked with a stub for the GPU: an H200, and one with less memory."""
    copy = patched_copy(include_folder(), tmp_path)
    program = flashinfer_build.launcher(copy, tmp_path)
    for launch in flashinfer_build.launches(program, 233472, 232448):
        if (launch.tile, launch.dim) == (128, 256):
            assert launch.x == 0  # more registers than there are: 64 rows serve there
            continue
        assert (launch.x, launch.warps_q, launch.warps_kv) == (32, 1 if launch.tile == 16 else 4, 1)
        operands = 2 * launch.dim * (launch.tile + 2 * 64)
        assert operands <= launch.shared < operands + 256, launch
    small = {(x.tile, x.dim) for x in flashinfer_build.launches(program, 102400, 101376) if not x.x}
    assert {(16, 256), (64, 256)} <= small and not {(16, 64), (64, 64), (64, 128)} & small
