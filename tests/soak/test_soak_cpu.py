"""The real CPU server under the soak, one with a planted break, and stock SGLang as control."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sgl_det.cli import main
from sgl_det.soak.kinds import KINDS

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]


def soak(server, out: Path, *argv: str) -> tuple[int, dict]:
    """Exit status and result of ``sgl-det soak``."""
    path = out / "soak.json"
    status = main(["soak", "--url", server.url, "--json", str(path), *argv])
    return status, json.loads(path.read_text())


def assert_bitwise(status: int, found: dict) -> None:
    assert (status, found["verdict"]) == (0, "bitwise"), found
    assert set(found["kinds"]) == set(KINDS) and found["mismatches"] == 0
    assert all(k["requests"] > 0 for k in found["kinds"].values())
    assert found["aborts"] and found["disconnects"] and found["flushes"] and found["warm"]


def test_a_minute_of_load_changes_no_bit(servers, tmp_path):
    status, found = soak(servers["ours"], tmp_path, "--minutes", "1", "--oracle", "66")
    assert_bitwise(status, found)
    assert found["retractions"] > 0 and found["most_at_once"] > 64


def test_a_planted_break_is_found_within_a_minute_and_replayed(servers, tmp_path, capsys):
    """One kernel in one rare number of rows; the same replay finds nothing without it."""
    planted, record = servers["planted"], str(tmp_path / "record.json")
    assert "plant: a linear layer of 11 rows" in planted.log.read_text(errors="replace")
    argv = ("--minutes", "1", "--oracle", "44", "--record", record)
    status, found = soak(planted, tmp_path, *argv)
    assert (status, found["verdict"], found["mismatches"] > 0) == (1, "diverged", True)
    assert found["first"]["into_s"] < 60
    kept = json.loads(Path(record).read_text())
    assert kept["key"] == found["key"] and len(kept["acts"]) > 1
    again = ("--replay", record)
    assert main(["soak", "--url", planted.url, *again, "--times", "8"]) == 1
    assert "\nREPRODUCED" in capsys.readouterr().out
    assert main(["soak", "--url", servers["ours"].url, *again, "--times", "2"]) == 0
    assert "NOT REPRODUCED" in capsys.readouterr().out


def test_control_stock_diverges(servers, tmp_path):
    argv = ("--minutes", "1", "--oracle", "22", "--record", str(tmp_path / "record.json"))
    argv += ("--kinds", "greedy,long,short,shared_prefix,multi_turn")
    status, found = soak(servers["stock"], tmp_path, *argv)
    assert (status, found["verdict"], found["key"]) == (1, "diverged", None)


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_half_an_hour_of_load_changes_no_bit(servers, tmp_path):
    """Of SGL_DET_SOAK_MINUTES minutes, where that is set."""
    minutes = os.environ.get("SGL_DET_SOAK_MINUTES", "30")
    assert_bitwise(*soak(servers["ours"], tmp_path, "--minutes", minutes))
