"""Which norm serves: the fused one where it is proven, ours where it is not, or none."""

from __future__ import annotations

import pytest

from sgl_det.patches import norms

KIND = ("rms", 8, "bfloat16")


@pytest.fixture
def unproven(monkeypatch):
    monkeypatch.setattr(norms, "_UNPROVEN_NORMS", set())
    return lambda: norms._UNPROVEN_NORMS


def checks(fused: str, ours: str):
    """What a proof finds with the fused kernel, and with ours once it serves."""
    return lambda: ours if KIND in norms._UNPROVEN_NORMS else fused


def test_fused_norm_serves_where_it_is_proven(unproven):
    assert norms._serving("RMSNorm", KIND, True, checks("", "unused")) == "fused"
    assert unproven() == set()


def test_ours_serves_where_the_fused_one_is_not(unproven):
    said = norms._serving("RMSNorm", KIND, True, checks("3 elements differ", ""))
    assert said.partition(",")[0] == "sgl_det" and "3 elements differ" in said
    assert unproven() == {KIND}


@pytest.mark.parametrize("held, named", [(True, "ours differs"), (False, "fused differs")])
def test_no_norm_without_a_proof(unproven, held, named):
    with pytest.raises(RuntimeError, match=f"RMSNorm \\(8 wide, bfloat16\\).*{named}"):
        norms._serving("RMSNorm", KIND, held, checks("fused differs", "ours differs"))
