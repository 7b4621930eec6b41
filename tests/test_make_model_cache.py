"""Where made-up models lie: `resolve_model`, its cache, and an import that costs nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sgl_det.make_model import cache, resolve_model


def test_resolve_model_makes_a_named_model_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    path = resolve_model("demo")
    assert path.startswith(str(tmp_path / "cache" / "sgl_det" / "models" / "demo-0-"))
    monkeypatch.setattr(cache, "_make_once", None)
    assert resolve_model("demo") == path
    assert resolve_model("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    (tmp_path / "demo").mkdir()
    assert resolve_model("demo") == "demo"


def test_resolve_model_makes_it_once_for_several_at_a_time(tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    code = "from sgl_det.make_model import resolve_model; print(resolve_model('demo'))"
    command = [sys.executable, "-c", code]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, env=os.environ | env, **pipes) for _ in range(2)]
    answers = [p.communicate(timeout=120) for p in both]
    assert [p.returncode for p in both] == [0, 0], answers
    assert answers[0][0] == answers[1][0]
    kept = [p.name for p in (tmp_path / "sgl_det" / "models").iterdir() if p.is_dir()]
    assert len(kept) == 1


def test_resolve_model_says_when_the_cache_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(OSError, match="set XDG_CACHE_HOME"):
        resolve_model("demo")


def test_import_needs_no_torch():
    code = "import sys, sgl_det.make_model; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
