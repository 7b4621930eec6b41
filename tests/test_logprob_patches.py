"""Log-probabilities that SGLang loses or misnames: of a retracted request, and of the last id."""

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


def named(ids, start=0, *, vocab_size=10, told=None):
    """The ids told of a prompt, where upstream clips at the last one."""

    def upstream(self, req, logprobs):
        asked = req.origin_input_ids[req.logprob_start_len :]
        req.logprob.input_token_logprobs_idx = told or [
            x if x < vocab_size - 1 else 0 for x in asked
        ]

    req = SimpleNamespace(
        origin_input_ids=list(ids), logprob_start_len=start, logprob=SimpleNamespace()
    )
    processor = SimpleNamespace(model_config=SimpleNamespace(vocab_size=vocab_size))
    logprobs._named(upstream)(processor, req, [])
    return req.logprob.input_token_logprobs_idx


def test_the_last_id_has_its_name():
    assert named([3, 9, 0, 9]) == [3, 9, 0, 9]
    assert named([9, 3, 9], start=1) == [3, 9]


def test_ids_that_stand_for_images_stay_clipped():
    assert named([3, 9, 12345]) == [3, 9, 0]


def test_other_lists_are_left_alone():
    assert named([9, 9, 9], told=[151654]) == [151654]
