"""A greedy row takes the largest logit, and of equal ones the first, whatever its neighbours do.

Where all rows of a batch are greedy SGLang takes the argmax. Beside a row that samples, a greedy
one is sampled too, with top_k 1: by a sort that leaves equal probabilities in any order.
"""

from __future__ import annotations

from functools import wraps

from sgl_det.patch import Patch
from sgl_det.patches.table import patches_of

_FIRST = "sgl_det_first_of_the_largest"


def _largest(original):
    @wraps(original)
    def _preprocess_logits(self, logits, sampling_info):
        logits = original(self, logits, sampling_info)
        if sampling_info.is_all_greedy:
            setattr(self, _FIRST, None)
            return logits
        # Before the logits become probabilities, of which more can be equal.
        setattr(self, _FIRST, logits.argmax(dim=-1))
        # Alone, its log-probability is of the logits as they are, whatever temperature was asked.
        greedy = sampling_info.top_ks.view(-1, 1) == 1
        sampling_info.temperatures = sampling_info.temperatures.masked_fill(greedy, 1.0)
        return logits

    return _preprocess_logits


def _sample(original):
    @wraps(original)
    def _sample_from_probs(self, probs, sampling_info, positions, simple_sampling_case):
        ids = original(self, probs, sampling_info, positions, simple_sampling_case)
        first, top_ks = getattr(self, _FIRST), sampling_info.top_ks
        if first is None or simple_sampling_case:
            return ids
        return ids.where(top_ks != 1, first.to(ids.dtype))

    return _sample_from_probs


_SAMPLER = "sglang.srt.layers.sampler:Sampler"
_TABLE = (
    (
        "largest",
        f"{_SAMPLER}._preprocess_logits",
        "20237a1055da",
        "the largest logit of each row is found as in a batch of greedy rows alone",
        _largest,
    ),
    (
        "sample",
        f"{_SAMPLER}._sample_from_probs",
        "c0fea482d5d4",
        "a greedy row beside one that samples takes it",
        _sample,
    ),
)


def patches() -> tuple[Patch, ...]:
    """The patches of every scheduler process."""
    return patches_of("greedy", _TABLE, "none: found by the probe, in a batch of two")
