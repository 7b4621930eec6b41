"""Code that requests bring along: one object a request, one row a call, errors of its own."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from sgl_det.check import FITS, judge_all
from sgl_det.patches import logit_processors


class Finish:
    def __init__(self, reason, status, kind):
        self.reason, self.status = reason, status


class Counting:
    """Adds one to each row that it sees, and says how many tokens it has been called for."""

    def __init__(self):
        self.calls = 0

    def __call__(self, logits, parameters):
        self.calls += 1
        assert logits.shape == (1, 5) and len(parameters) == 1
        return logits + parameters[0].get("add", 1)


@pytest.fixture(autouse=True)
def upstream(monkeypatch):
    """The two modules of SGLang's that the patch asks."""
    made = {
        "sglang.srt.sampling.custom_logit_processor": {
            "CustomLogitProcessor": SimpleNamespace(from_str=lambda text: CODE[text]())
        },
        "sglang.srt.managers.schedule_batch": {"FINISH_ABORT": Finish},
    }
    for name, content in made.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


CODE = {
    "counting": Counting,
    "flat": lambda: lambda logits, _: logits[0],
    "nothing": lambda: lambda *_: None,
    "raising": lambda: lambda *_: 1 / 0,
    "in place": lambda: lambda logits, _: logits.fill_(7.0),
    "half": lambda: _half,
}


def _half(logits, _):
    logits[0, :2] = 9.0
    raise RuntimeError("half way")


def request(code, chunks=0):
    return SimpleNamespace(
        custom_logit_processor=code, inflight_middle_chunks=chunks, to_finish=None
    )


def apply(reqs, logits, **parameters):
    mask = torch.tensor([r.custom_logit_processor is not None for r in reqs])
    info = SimpleNamespace(
        custom_logit_processor={1: (None, mask)},
        custom_params=[{"__req__": r, **parameters} for r in reqs],
    )
    logit_processors._row_by_row(None)(logits, info)


def test_each_request_has_an_object_of_its_own():
    first, second, other = request("counting"), request("counting"), request(None)
    logits = torch.zeros(3, 5)
    apply([first, other, second], logits)
    apply([second], logits[:1])
    assert logits[:, 0].tolist() == [2, 0, 1]
    calls = [getattr(r, logit_processors._OWN).calls for r in (first, second)]
    assert calls == [1, 2]


def test_nothing_is_called_for_a_chunk_in_the_middle_of_a_prompt():
    req, logits = request("counting", chunks=1), torch.zeros(1, 5)
    apply([req], logits)
    assert not logits.any() and not hasattr(req, logit_processors._OWN)


@pytest.mark.parametrize("code", ["flat", "nothing", "raising", "half"])
def test_an_error_ends_its_request_alone(code):
    bad, good, logits = request(code), request("counting"), torch.zeros(2, 5)
    apply([bad, good], logits)
    assert bad.to_finish.status == 400 and "custom_logit_processor" in bad.to_finish.reason
    assert good.to_finish is None and logits.tolist() == [[0.0] * 5, [1.0] * 5]
    apply([bad, good], logits)  # it is not called again
    assert logits[0].tolist() == [0.0] * 5


def test_rows_may_be_edited_in_place():
    logits = torch.zeros(2, 5)
    apply([request("in place"), request(None)], logits)
    assert logits.tolist() == [[7.0] * 5, [0.0] * 5]


def test_code_that_cannot_be_loaded_fails_when_it_is_called():
    make = logit_processors._loading(lambda text: json.loads(text))("{")
    with pytest.raises(json.JSONDecodeError):
        make()(None, None)


def test_a_processor_learns_its_request_where_it_has_no_parameters():
    for code, given, want in (("x", None, {}), ("x", {"a": 1}, {"a": 1}), (None, None, None)):
        params = SimpleNamespace(custom_params=given)
        logit_processors.settle(
            SimpleNamespace(custom_logit_processor=code, sampling_params=params)
        )
        assert params.custom_params == want


def test_patches_fit_what_is_installed():
    assert [v for v in judge_all(logit_processors.patches()) if v.verdict != FITS] == []
