"""A request retracted before its first token: nothing is noted as sent until there is something."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sgl_det.patches import logprobs


@pytest.fixture
def told():
    """The requests of which upstream's `accept` was told, by way of ours."""
    found = []

    def accept(self, *, req):
        found.append(req.name)

    ours = logprobs._heard(accept)
    return lambda **req: (ours(None, req=SimpleNamespace(**req)), found)[1]


def test_nothing_is_told_of_a_request_without_a_token(told):
    assert told(name="retracted", output_ids=[], finished=lambda: False) == []


def test_what_has_tokens_or_an_end_is_told(told):
    told(name="running", output_ids=[7], finished=lambda: False)
    assert told(name="empty", output_ids=[], finished=lambda: True) == ["running", "empty"]
