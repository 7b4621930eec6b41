"""``sgl-det check`` on what is installed, on wheels, and on copies that somebody edited."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

import fake_upstream
from sgl_det import check
from sgl_det.patch import Patch
from sgl_det.patches import all_patches
from sgl_det.sources import fingerprint, installed

SGLANG = {p.name: p for p in all_patches() if p.distribution == "sglang"}


def _module_file(patch: Patch) -> tuple[str, str]:
    """The path inside a wheel of the target's module, and the installed text."""
    source = installed("sglang", "sglang")
    stem = patch.target.partition(":")[0].replace(".", "/")
    for path in (f"{stem}.py", f"{stem}/__init__.py"):
        text = source.read(path)
        if text is not None:
            return path, text
    raise AssertionError(f"{patch.target} is not installed")


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    """What a wheel of the installed SGLang would hold, as far as patches touch it."""
    v = version("sglang")
    metadata = f"Metadata-Version: 2.1\nName: sglang\nVersion: {v}\n"
    return {
        **dict(map(_module_file, SGLANG.values())),
        f"sglang-{v}.dist-info/METADATA": metadata,
    }


def _write(files: dict[str, str], path: Path, kind: str) -> Path:
    if kind == "wheel":
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
    else:
        for name, text in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(text)
    return path


def _check(*argv: object) -> int:
    parser = argparse.ArgumentParser()
    check.add_arguments(parser)
    return check.run(parser.parse_args([str(a) for a in argv]))


def _verdicts(capsys, *argv: object) -> tuple[int, dict[str, dict]]:
    code = _check(*argv, "--json")
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] == (code == 0)
    return code, {v["name"]: v for v in told["patches"]}


def test_what_is_installed_fits(capsys):
    code, verdicts = _verdicts(capsys)
    assert code == 0 and {v["verdict"] for v in verdicts.values()} == {check.FITS}
    assert set(verdicts) == {p.name for p in all_patches()}


@pytest.mark.parametrize("kind", ["wheel", "folder"])
def test_a_copy_fits_until_one_function_is_edited(tmp_path, files, capsys, kind):
    whole = _write(files, tmp_path / "whole", kind)
    code, verdicts = _verdicts(capsys, "--wheel", whole)
    assert code == 0 and set(verdicts) == set(SGLANG)

    victim = next(iter(SGLANG.values()))
    path, text = _module_file(victim)
    head = f"def {victim.target.rpartition(':')[2].rpartition('.')[2]}("
    assert text.count(head) == 1
    before, found, after = text.partition(head)
    edited = _write({**files, path: before + found + "tampered, " + after}, tmp_path / "e", kind)
    code, verdicts = _verdicts(capsys, "--wheel", edited)
    bad = [v for v in verdicts.values() if v["verdict"] != check.FITS]
    assert code == 1 and [v["name"] for v in bad] == [victim.name]
    assert bad[0]["verdict"] == check.DOES_NOT_FIT
    assert victim.fingerprints[0] in bad[0]["detail"]

    renamed = _write({**files, path: before + "def gone(" + after}, tmp_path / "g", kind)
    code, verdicts = _verdicts(capsys, "--wheel", renamed)
    assert code == 1 and verdicts[victim.name]["verdict"] == check.GONE


def test_a_version_out_of_range_does_not_fit(tmp_path, files, capsys):
    old = version("sglang")
    newer = {
        n.replace(old, "0.99.0"): t.replace(f"Version: {old}", "Version: 0.99.0")
        for n, t in files.items()
    }
    code, verdicts = _verdicts(capsys, "--wheel", _write(newer, tmp_path / "w", "wheel"))
    assert code == 1 and {v["verdict"] for v in verdicts.values()} == {check.DOES_NOT_FIT}
    assert {v["version"] for v in verdicts.values()} == {"0.99.0"}
    detail = verdicts[next(iter(SGLANG))]["detail"]
    assert detail.startswith("sglang is 0.99.0, needs sglang>=")


def test_several_wheels_are_judged_each(tmp_path, files, capsys):
    one, two = (_write(files, tmp_path / n, "wheel") for n in "ab")
    for argv in (("--wheel", one, two), ("--wheel", one, "--wheel", two)):
        assert _check(*argv) == 0
        last = capsys.readouterr().out.splitlines()[-1]
        assert last == f"{2 * len(SGLANG)} of {2 * len(SGLANG)} patches fit"


BAD = {
    "missing": (None, "is not a wheel"),
    "text": ("not a zip", "is not a wheel"),
    "empty_folder": ({}, "has 0 *.dist-info folders"),
    "other": ({"o-1.dist-info/METADATA": "Name: other\nVersion: 1\n"}, "no patch is for other"),
    "no_version": ({"o-1.dist-info/METADATA": "Name: sglang\n"}, "gives no name and version"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_wheel_is_one_sentence(tmp_path, capsys, case):
    content, message = BAD[case]
    path = tmp_path / "x"
    if isinstance(content, str):
        path.write_text(content)
    elif content is not None:
        path.mkdir()
        _write(content, path, "folder")
    assert _check("--wheel", path) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


def test_broken_source_does_not_fit(tmp_path, files):
    victim = next(iter(SGLANG.values()))
    path, _ = _module_file(victim)
    broken = _write({**files, path: "def f(:\n"}, tmp_path / "w", "wheel")
    verdicts = {v.name: v for v in check.judge_all(all_patches(), [broken])}
    assert verdicts[victim.name].verdict == check.DOES_NOT_FIT
    assert "does not parse" in verdicts[victim.name].detail


def test_what_is_not_installed_does_not_fit():
    patch = fake_upstream.patch(
        "x", requires="fake-not-there<1", target="nowhere:f", fingerprints=("0" * 12,)
    )
    (verdict,) = check.judge_all([patch])
    assert verdict.verdict == check.DOES_NOT_FIT and "is not installed" in verdict.detail


BRANCHES = """
def f(x):
    return "never runs"

if FAST:
    def f(x):
        return 1
else:
    def f(x):
        return 2

def g(x):
    return 1
def g(x):
    return 2

def outer():
    def g(x):
        return 2

try:
    import fast
except ImportError:
    class C:
        @property
        def size(self):
            return 1
"""


@pytest.mark.parametrize(
    "target, reviewed, verdict",
    [
        ("f", ("f1",), check.DOES_NOT_FIT),
        ("f", ("f1", "f2"), check.FITS),
        ("g", ("g2",), check.FITS),
        ("g", ("g1",), check.DOES_NOT_FIT),
        ("C.size", ("size",), check.DOES_NOT_FIT),
        ("C.gone", ("g1",), check.GONE),
        ("outer.g", ("g2",), check.GONE),
    ],
)
def test_branches_and_shadowed_definitions(tmp_path, target, reviewed, verdict):
    """Each branch may be the one that runs, so each must be reviewed; a shadowed def never runs."""
    texts = {
        "f1": "def f(x):\n    return 1",
        "f2": "def f(x):\n    return 2",
        "g1": "def g(x):\n    return 1",
        "g2": "def g(x):\n    return 2",
        "size": "@property\ndef size(self):\n    return 1",
    }
    content = {"b.py": BRANCHES, "b-1.dist-info/METADATA": "Name: fakeup\nVersion: 1.2.0\n"}
    patch = fake_upstream.patch(
        "x",
        target=f"b:{target}",
        fingerprints=tuple(fingerprint(texts[t]) for t in reviewed),
    )
    (found,) = check.judge_all([patch], [_write(content, tmp_path, "folder")])
    assert found.verdict == verdict, found


def test_check_imports_no_upstream():
    code = (
        "import sys; from sgl_det.cli import main; code = main(['check']);"
        "heavy = {'torch', 'sglang', 'flashinfer', 'triton', 'numpy'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stderr + child.stdout
