"""``sgl-det probe`` as a command, and the comparison of two reports."""

from __future__ import annotations

import argparse
import json

import pytest

from sgl_det.probe import verb
from sgl_det.probe.client import ProbeError
from sgl_det.probe.restart import compare_reports


def stored(key="k", tokens=(1, 2), prompt="d", name="p"):
    entry = {"prompt": prompt, "tokens": list(tokens), "logprobs": ["0x1p-1"] * len(tokens)}
    return {"key": key, "answers": {name: entry}}


def test_reports_of_equal_key_are_compared():
    assert compare_reports(stored(), stored()).verdict == "bitwise"
    assert compare_reports(stored(), stored(tokens=(1, 3))).first.index == 1


@pytest.mark.parametrize(
    "a, b",
    [
        (stored(), stored(key="other")),
        (stored(key=None), stored(key=None)),
        (stored(), stored(prompt="another seed")),
        (stored(), stored(name="q")),
    ],
    ids=["keys-differ", "no-key", "other-prompt", "nothing-in-common"],
)
def test_incomparable_reports_are_refused(a, b):
    with pytest.raises(ProbeError, match="not comparable"):
        compare_reports(a, b)


def call(*argv) -> int:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return verb.run(parser.parse_args(argv))


def test_compare_verb(tmp_path, capsys):
    paths = [tmp_path / n for n in ("a.json", "b.json", "c.json")]
    for path, content in zip(paths, (stored(), stored(), stored(tokens=(4, 2))), strict=True):
        path.write_text(json.dumps(content))
    assert call("--compare", str(paths[0]), str(paths[1])) == 0
    assert call("--compare", str(paths[0]), str(paths[2])) == 1
    assert "restart: diverged" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, words",
    [
        ((), "either --url"),
        (("--url", "localhost:1"), "http://"),
        (("--url", "http://127.0.0.1:9"), "cannot reach"),
        (("--url", "http://127.0.0.1:9", "--axes", "speed"), "does not drive the axis 'speed'"),
        (("--url", "http://127.0.0.1:9", "--json", "/no/such/x.json"), "folder does not exist"),
        (("--compare", "/no/a.json", "/no/b.json"), "cannot read"),
    ],
    ids=["nothing", "no-scheme", "no-server", "axis", "folder", "file"],
)
def test_usage_errors_are_one_sentence_and_exit_2(argv, words, capsys):
    assert call(*argv) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1
