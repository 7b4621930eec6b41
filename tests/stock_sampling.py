"""Run as a script, on a CPU: SGLang's own sampler and penalties and ours, on the same rows.

It prints one JSON object: for each of both, in how many rows a neighbour changed something. SGLang
hashes its noise on a GPU; `murmur` stands in. A process of its own, for the stand-in of sgl_kernel.
"""

from __future__ import annotations

import json
import os
from functools import partial
from types import SimpleNamespace

from murmur import murmur_hash32

ROWS, VOCAB = 48, 200
ALL = 1 << 30
# Where SGLang's hash is 2^32 - 1, found by search, and its noise infinite: seed, position, column.
INFINITE = 5_758_664, 7, 104


def upstream():
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    from sgl_det.patches import sgl_kernel_stub

    sgl_kernel_stub.install()
    from sglang.srt.layers import sampler

    kernel = SimpleNamespace(sampling_backend="pytorch")
    flags = SimpleNamespace(enable_deterministic_inference=True)
    sampler.get_exec = lambda: SimpleNamespace(kernel=kernel, deterministic=flags)
    sampler.murmur_hash32 = murmur_hash32
    sampler.multinomial_with_seed = sampler.multinomial_with_seed._torchdynamo_orig_callable
    return sampler


def info(top_ks, top_ps, min_ps, temperature=1.0):
    import torch

    n = len(top_ks)
    return SimpleNamespace(
        temperatures=torch.full((n, 1), temperature),
        top_ks=torch.tensor(top_ks, dtype=torch.int32),
        top_ps=torch.tensor(top_ps),
        min_ps=torch.tensor(min_ps),
        sampling_seed=torch.arange(n) + 11,
        is_all_greedy=all(k <= 1 for k in top_ks),
        need_top_p_sampling=any(p < 1 for p in top_ps),
        need_top_k_sampling=any(k != ALL for k in top_ks),
        need_min_p_sampling=any(p > 0 for p in min_ps),
        return_sampling_masks=None,
        grammars=None,
    )


def drawn(module, forward, logits, parameters):
    """Tokens, and the bits of all log-probabilities."""
    import torch

    told = []
    fake = SimpleNamespace(
        rl_on_policy_target=None,
        enable_deterministic=True,
        use_log_softmax_logprob=False,
        use_ascend_backend=False,
        output_logprob_processor=SimpleNamespace(
            compute_logprobs=lambda values, *_: (
                told.append(values.clone()),
                SimpleNamespace(write_output_to=lambda _: None),
            )[1]
        ),
        _preprocess_logits=lambda logits, _: logits,
        _sync_token_ids_across_tp=lambda *_: None,
    )
    fake._sample_from_probs = partial(module.Sampler._sample_from_probs, fake)
    output = SimpleNamespace(next_token_logits=logits.clone())
    positions = torch.full((len(logits),), INFINITE[1])
    tokens = forward(fake, output, parameters, True, [0] * len(logits), None, positions)
    return tokens.tolist(), told[0].view(torch.int32)


def changed(module, forward, mine, neighbour, logits):
    """Rows whose token or log-probabilities change when one row of other parameters joins."""
    n = len(logits) - 1
    columns = list(zip(*[mine] * n, strict=True))
    alone, bits = drawn(module, forward, logits[:n], info(*columns))
    both = [[*column, extra] for column, extra in zip(columns, neighbour, strict=True)]
    beside, others = drawn(module, forward, logits, info(*both))
    tokens = sum(a != b for a, b in zip(alone, beside[:n], strict=True))
    return {"tokens": tokens, "logprobs": int((bits != others[:n]).any(1).sum())}


def sampled(module, forward):
    import torch

    logits = 2 * torch.randn(ROWS + 1, VOCAB, generator=torch.Generator().manual_seed(1))
    # Different logits, whose probabilities are equal.
    near = torch.arange(VOCAB).flip(0).mul(-1e-10).expand(ROWS + 1, -1).roll(3, 1)
    plain, greedy = (ALL, 1.0, 0.0), (1, 1.0, 0.0)
    found = {
        "plain beside greedy": changed(module, forward, plain, greedy, logits),
        "plain beside top_p": changed(module, forward, plain, (ALL, 0.9, 0.0), logits),
        "greedy beside plain": changed(module, forward, greedy, plain, near),
    }
    certain = torch.full((1, VOCAB), -1000.0)
    certain[0, 0] = 0.0
    asked = info(*[[x] for x in plain])
    asked.sampling_seed = torch.tensor(INFINITE[:1])
    (found["a token that is certain"],), _ = drawn(module, forward, certain, asked)
    try:
        drawn(module, forward, logits[:1], info([ALL], [1.0], [0.1]))
        found["min_p"] = "served"
    except AssertionError as error:
        found["min_p"] = str(error)
    return found


def penalties(patched: bool):
    """The penalties of one request, by which of its tokens were known at each step."""
    import torch
    from sglang.srt.sampling import penaltylib
    from sglang.srt.sampling.penaltylib.orchestrator import BatchedPenalizerOrchestrator

    from sgl_det.patches.penalties import catch_up

    params = SimpleNamespace(
        frequency_penalty=0.7, presence_penalty=0.3, repetition_penalty=1.2, min_new_tokens=0
    )
    kinds = {
        penaltylib.BatchedFrequencyPenalizer,
        penaltylib.BatchedPresencePenalizer,
        penaltylib.BatchedRepetitionPenalizer,
    }
    tokens, found = [3, 3, 5, 3, 8], []
    for known in ((0, 1, 2, 3, 4, 5), (0, 0, 1, 3, 3, 5), (5,)):
        req = SimpleNamespace(sampling_params=params, output_ids=[], origin_input_ids=[1])
        batch = Batch([req])
        made = BatchedPenalizerOrchestrator(9, batch, kinds)
        for n in known:
            req.output_ids = tokens[:n]
            if patched:
                catch_up(made)
            else:
                last = req.output_ids[-1] if req.output_ids else req.origin_input_ids[-1]
                made.cumulate_output_tokens(torch.tensor([last]))
        logits = torch.linspace(-1, 1, 9).view(1, -1)
        made.accumulate_additive_penalties(logits)
        logits *= made.accumulate_scaling_penalties()
        found.append(str(logits.view(torch.int32).tolist()))
    return len(set(found))


def ways_to_penalise(patched: bool):
    """The numbers that differ between a step scheduled ahead and one that is not."""
    import torch
    from sglang.srt.sampling import penaltylib
    from sglang.srt.sampling.penaltylib.orchestrator import BatchedPenalizerOrchestrator

    from sgl_det.patches.penalties import _adding

    params = SimpleNamespace(frequency_penalty=0.7, presence_penalty=0.3)
    kinds = {penaltylib.BatchedFrequencyPenalizer, penaltylib.BatchedPresencePenalizer}
    req = SimpleNamespace(sampling_params=params, output_ids=[1], origin_input_ids=[1])
    batch = Batch([req])  # the orchestrator does not keep it alive
    made = BatchedPenalizerOrchestrator(VOCAB, batch, kinds)
    made.cumulate_output_tokens(torch.tensor([3]))
    for penalizer in made.penalizers.values():  # of as many tokens as there are
        kept = next(x for x in vars(penalizer) if x.startswith("cumulated"))
        setattr(penalizer, kept, torch.rand(1, VOCAB, generator=torch.Generator().manual_seed(7)))
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2))
    ahead, now = torch.zeros(1, VOCAB), logits.clone()
    made.accumulate_additive_penalties(ahead)
    apply = BatchedPenalizerOrchestrator.apply
    (_adding(apply) if patched else apply)(made, now)
    return int((now.view(torch.int32) != (logits + ahead).view(torch.int32)).sum())


def default_seeds():
    """The seeds of two requests that name none, as SGLang's scheduler fills them in."""
    from sglang.srt.sampling import sampling_batch_info
    from sglang.srt.sampling.sampling_params import SamplingParams

    flags = SimpleNamespace(enable_deterministic_inference=True)
    features = SimpleNamespace(enable_custom_logit_processor=False)
    execution = SimpleNamespace(deterministic=flags, features=features)
    sampling_batch_info.get_exec = lambda: execution
    sampling_batch_info.get_server_args = lambda: None
    reqs = [
        SimpleNamespace(sampling_params=SamplingParams(), return_sampling_mask=False)
        for _ in range(2)
    ]
    made = sampling_batch_info.SamplingBatchInfo.from_schedule_batch(Batch(reqs), 9)
    return made.sampling_seed.tolist()


def processors(module, apply):
    """The tokens banned for two requests with the same code, or the error that it makes."""
    import torch
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    text = DisallowedTokensLogitsProcessor.to_str()
    reqs = [
        SimpleNamespace(custom_logit_processor=text, inflight_middle_chunks=0, to_finish=None)
        for _ in range(2)
    ]
    asked = Rows(
        custom_logit_processor={0: (DisallowedTokensLogitsProcessor(), torch.tensor([True, True]))},
        custom_params=[{"token_ids": [3 + i], "__req__": req} for i, req in enumerate(reqs)],
    )
    logits = torch.zeros(2, 9)
    try:
        apply(logits, asked)
    except AssertionError as error:
        return type(error).__name__
    return [row.isinf().nonzero().view(-1).tolist() for row in logits]


class Rows(SimpleNamespace):
    """The part of a batch's parameters that SGLang counts rows by."""

    def __len__(self) -> int:
        return len(self.custom_params)


class Batch:
    """The part of SGLang's batch that penalties look at."""

    def __init__(self, reqs) -> None:
        self.reqs, self.device = reqs, "cpu"


def main() -> None:
    module = upstream()
    from sgl_det.patches import logit_processors, sampler

    ours = sampler._sampling(module.Sampler.forward)
    found = {"stock": sampled(module, module.Sampler.forward), "ours": sampled(module, ours)}
    for name in found:
        found[name]["penalties"] = penalties(name == "ours")
        found[name]["ways"] = ways_to_penalise(name == "ours")
    theirs = module.apply_custom_logit_processor
    found["stock"]["processors"] = processors(module, theirs)
    found["ours"]["processors"] = processors(module, logit_processors._row_by_row(theirs))
    found["stock"]["seeds"] = default_seeds()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
