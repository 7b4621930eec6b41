"""Each row of a batch gets its token and its log-probabilities by itself, whoever is beside it.

SGLang looks at flags of the whole batch: whether all rows are greedy, whether any filters, whether
one ever did. They decide how a row is sampled, and by what its noise is counted: token ids, or
ranks among sorted probabilities. Here a row's parameters, seed and position decide alone.

    token      the first of the largest logits, where top_k is 1; else that of `kernels.sampler`
    logprobs   log_softmax(logits / temperature), with 1 for the temperature where top_k is 1
"""

from __future__ import annotations

from functools import wraps

from sgl_det.patch import Patch
from sgl_det.patches.table import patches_of


def tokens(logits, info, positions):
    """token [N], int64, of logits [N, V] and SGLang's parameters of their rows."""
    if info.is_all_greedy:
        return logits.argmax(dim=-1)  # what `sample` returns where top_k is 1, for less
    from sgl_det.kernels.sampler import sample

    rows = (info.temperatures, info.top_ks, info.top_ps, info.min_ps, info.sampling_seed)
    return sample(logits, *rows, positions)


def logprobs(logits, info):
    """Log-probabilities [N, V], the same whether others sample or ask for theirs."""
    import torch

    greedy = info.top_ks.view(-1, 1) <= 1
    heated = logits / info.temperatures.view(-1, 1).masked_fill(greedy, 1.0)
    return torch.nn.functional.log_softmax(heated, dim=-1)


def _sampling(original):
    @wraps(original)
    def forward(
        self,
        logits_output,
        sampling_info,
        return_logprob,
        top_logprobs_nums,
        token_ids_logprobs,
        positions,
    ):
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        found = tokens(logits, sampling_info, positions)
        if return_logprob:
            told = logprobs(logits, sampling_info)
            asked = (top_logprobs_nums, token_ids_logprobs, found)
            self.output_logprob_processor.compute_logprobs(told, *asked).write_output_to(
                logits_output
            )
        self._sync_token_ids_across_tp(found, sampling_info)
        return found

    return forward


_TABLE = (
    (
        "forward",
        "sglang.srt.layers.sampler:Sampler.forward",
        "945452a3600d",
        "a row's token follows from its logits, parameters, seed and position, and nothing else",
        _sampling,
    ),
)


def patches() -> tuple[Patch, ...]:
    """The patches of every scheduler process."""
    return patches_of("sampler", _TABLE, "none: SGLang samples a batch by flags of the whole batch")
