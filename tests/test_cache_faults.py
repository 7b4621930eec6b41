"""A cache folder that cannot be written, as the launcher meets it before any server."""

from __future__ import annotations

import pytest

from sgl_det.environment import Refused
from sgl_det.launch_server import complete


def test_a_made_up_model_that_cannot_be_kept_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "sgl_det").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(Refused, match="^the cache folder .* cannot be written .*XDG_CACHE_HOME"):
        complete(["--model-path", "demo"], True)
