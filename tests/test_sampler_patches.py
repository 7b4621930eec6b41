"""A row's token and log-probabilities beside others, in SGLang's sampler and in ours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sgl_det.check import FITS, judge_all
from sgl_det.patches import penalties, sampler, waits
from sgl_det.testing import assert_bitwise_equal
from stock_sampling import INFINITE

ALL = 1 << 30


@pytest.fixture(scope="module")
def found():
    """What `stock_sampling` saw, in a process of its own."""
    script = Path(__file__).with_name("stock_sampling.py")
    child = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


CASES = ("plain beside greedy", "plain beside top_p", "greedy beside plain")


@pytest.mark.parametrize("case", CASES)
def test_neighbours_change_nothing(found, case):
    assert found["ours"][case] == {"tokens": 0, "logprobs": 0}


@pytest.mark.parametrize("case", CASES)
def test_control_neighbours_change_tokens_in_sglangs_sampler(found, case):
    assert found["stock"][case]["tokens"] > 20


def test_min_p_is_served_and_ends_sglangs_scheduler(found):
    assert found["ours"]["min_p"] == "served" and found["stock"]["min_p"] != "served"


def test_no_noise_is_infinite(found):
    assert found["ours"]["a token that is certain"] == 0
    assert found["stock"]["a token that is certain"] == INFINITE[2]


def test_penalties_do_not_depend_on_when_tokens_are_known(found):
    assert found["ours"]["penalties"] == 1 and found["stock"]["penalties"] == 3


def test_penalties_do_not_depend_on_overlap(found):
    assert found["ours"]["ways"] == 0 and found["stock"]["ways"] > 10


def test_code_of_a_request_edits_its_own_row_and_ends_sglangs_scheduler(found):
    assert found["ours"]["processors"] == [[3], [4]]
    assert found["stock"]["processors"] == "AssertionError"


def test_control_all_requests_without_a_seed_have_the_same(found):
    assert found["stock"]["seeds"] == [42, 42]


def info(top_ks, temperatures, greedy=False):
    return SimpleNamespace(
        is_all_greedy=greedy,
        temperatures=torch.tensor(temperatures).view(-1, 1),
        top_ks=torch.tensor(top_ks, dtype=torch.int32),
        top_ps=torch.ones(len(top_ks)),
        min_ps=torch.zeros(len(top_ks)),
        sampling_seed=torch.arange(len(top_ks)),
    )


def test_a_batch_of_greedy_rows_is_sampled_as_beside_others():
    logits = torch.randn(64, 50).round()
    positions = torch.zeros(64, dtype=torch.int64)
    alone = sampler.tokens(logits, info([1] * 64, [0.7] * 64, greedy=True), positions)
    beside = sampler.tokens(logits, info([1] * 64, [0.7] * 64), positions)
    assert_bitwise_equal(alone, beside)
    first = [int((row == row.max()).nonzero()[0]) for row in logits]
    assert alone.tolist() == first


def test_greedy_rows_are_told_the_log_probability_of_their_logits():
    logits = torch.randn(2, 50)
    told = sampler.logprobs(logits, info([1, ALL], [0.5, 0.5]))
    assert_bitwise_equal(told[:1], torch.log_softmax(logits[:1], -1))
    assert_bitwise_equal(told[1:], torch.log_softmax(logits[1:] / 0.5, -1))


def test_logits_are_left_as_they_are():
    logits = torch.randn(2, 50)
    before, asked = logits.clone(), info([1, ALL], [0.5, 0.5])
    sampler.tokens(logits, asked, torch.zeros(2, dtype=torch.int64))
    sampler.logprobs(logits, asked)
    assert_bitwise_equal(logits, before)


def test_only_a_batch_that_looks_back_waits():
    calls = []
    wait = waits._waiting(lambda *_a, **_k: calls.append(1) or False)

    def asked(queue, *, required=False, code=False):
        orchestrator = SimpleNamespace(is_required=required)
        info = SimpleNamespace(penalizer_orchestrator=orchestrator, has_custom_logit_processor=code)
        batch = SimpleNamespace(sampling_info=info)
        return wait(SimpleNamespace(result_queue=queue), batch, last_batch=None)

    for kind in ("required", "code"):
        assert asked([1], **{kind: True}) and not asked([], **{kind: True}) and not calls
    assert not asked([1]) and calls == [1]
    assert not wait(SimpleNamespace(result_queue=[1]), None, last_batch=None)


def test_patches_fit_what_is_installed():
    ours = (*sampler.patches(), *penalties.patches(), *waits.patches())
    assert [v for v in judge_all(ours) if v.verdict != FITS] == []
