"""What was proven, on disk: read only where this machine and these sources wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sgl_det.kernels import proof_cache
from sgl_det.kernels.proof_cache import ProofCache

MACHINE = {
    "gpu": "NVIDIA H200",
    "torch": "2.11.0",
    "deep_gemm": None,
    "sources": "0123456789abcdef",
}
LAYER = {"n": 6144, "k": 4096, "dtype": "torch.bfloat16", "edges": [1, 2], "only": ""}
RESULT = {"proven": {"triton": [1, 2]}, "buckets": [{"rows": 1, "kernel": "triton", "us": 3.25}]}


@pytest.fixture
def cache(tmp_path):
    """A cache in which one result lies."""
    cache = ProofCache(tmp_path / "proofs", MACHINE)
    cache.write(LAYER, RESULT)
    return cache


def the_file(cache) -> Path:
    (file,) = cache.folder.iterdir()
    return file


def test_what_was_written_is_read(cache):
    assert cache.read(LAYER) == RESULT
    assert ProofCache(cache.folder, dict(MACHINE)).read(dict(LAYER)) == RESULT
    assert the_file(cache).name.startswith("linear-") and the_file(cache).suffix == ".json"


def test_nothing_is_read_where_nothing_was_written(tmp_path):
    cache = ProofCache(tmp_path / "none", MACHINE)
    assert cache.read(LAYER) is None and not cache.folder.exists()


@pytest.mark.parametrize("field", LAYER)
def test_another_layer_is_another_entry(cache, field):
    assert cache.read(LAYER | {field: "another"}) is None
    cache.write(LAYER | {field: "another"}, {"proven": {}})
    assert cache.read(LAYER) == RESULT


@pytest.mark.parametrize("field", MACHINE)
def test_another_machine_does_not_read_it(cache, field):
    other = ProofCache(cache.folder, MACHINE | {field: "another"})
    assert other.read(LAYER) is None
    # Nor where the file lies under the name that the other machine looks for.
    the_file(cache).rename(other._path(LAYER))
    assert other.read(LAYER) is None


def edited(text: str, **fields) -> str:
    entry = json.loads(text)
    entry["body"] |= fields
    return json.dumps(entry)


def signed(body) -> str:
    return json.dumps({"digest": proof_cache._digest(body), "body": body})


SPOILT = {
    "empty": lambda text: "",
    "truncated": lambda text: text[: len(text) // 2],
    "one character less": lambda text: text[:-1],
    "another kernel": lambda text: text.replace("triton", "tritom"),
    "another time": lambda text: text.replace("3.25", "3.5"),
    "result edited": lambda text: edited(text, result={"proven": {}}),
    "field added": lambda text: edited(text, more=1),
    "no digest": lambda text: json.dumps({"body": json.loads(text)["body"]}),
    "no body": lambda text: json.dumps({"digest": json.loads(text)["digest"]}),
    "list": lambda text: "[]",
    "null": lambda text: "null",
    "binary": lambda text: "\x00\udcff",
    "body without fields": lambda text: signed({}),
    "body that is a list": lambda text: signed([]),
    "body without a result": lambda text: signed({"machine": MACHINE, "layer": LAYER}),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_a_spoilt_file_is_ignored_and_written_anew(cache, spoil):
    file = the_file(cache)
    file.write_text(spoil(file.read_text("utf-8")), "utf-8", "surrogateescape")
    assert cache.read(LAYER) is None
    cache.write(LAYER, RESULT)
    assert cache.read(LAYER) == RESULT and the_file(cache) == file


def test_a_folder_in_place_of_the_file_is_ignored(cache):
    file = the_file(cache)
    file.unlink()
    file.mkdir()
    assert cache.read(LAYER) is None
    cache.write(LAYER, RESULT)
    assert cache.read(LAYER) is None


def test_a_folder_that_cannot_be_made_is_fine(tmp_path):
    (tmp_path / "file").write_text("no folder")
    cache = ProofCache(tmp_path / "file" / "proofs", MACHINE)
    cache.write(LAYER, RESULT)
    assert cache.read(LAYER) is None


def test_a_folder_that_cannot_be_written_is_fine(cache, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(proof_cache.tempfile, "mkstemp", full)
    cache.write(LAYER, {"proven": {}})
    assert cache.read(LAYER) == RESULT


def test_nothing_but_whole_files_is_left(cache):
    for i in range(3):
        cache.write(LAYER | {"n": i}, RESULT)
    assert {file.suffix for file in cache.folder.iterdir()} == {".json"}


def test_a_file_that_cannot_take_its_place_is_removed(cache):
    other = LAYER | {"n": 1}
    cache._path(other).mkdir()
    cache.write(other, RESULT)
    assert cache.read(other) is None and not list(cache.folder.glob("*.part"))


def test_machine_says_what_decides_the_bits(monkeypatch):
    gpu = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    one = proof_cache.machine.__wrapped__()
    assert {"gpu", "torch", "triton", "cublas", "deep_gemm", "sources"} <= one.keys()
    assert one == json.loads(json.dumps(one)) == proof_cache.machine.__wrapped__()
    gpu.multi_processor_count = 114
    assert proof_cache.machine.__wrapped__() != one


def test_sources_are_those_that_decide_the_bits(monkeypatch):
    here = Path(proof_cache.__file__).parent
    assert all((here / name).exists() for name in proof_cache._SOURCES)
    assert {p.name for p in here.glob("matmul*.py")} <= set(proof_cache._SOURCES)
    before = proof_cache._digest_of_sources()
    monkeypatch.setattr(proof_cache, "_SOURCES", proof_cache._SOURCES[1:])
    assert proof_cache._digest_of_sources() != before
