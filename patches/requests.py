"""A bad request is refused where it arrives, with a reason; the scheduler never sees it.

SGLang checks much of this already. What it does not check reaches the scheduler, where a value of
a wrong type or out of range raises and ends the server for every client. Every route (native,
OpenAI, Ollama, Anthropic, the offline Engine) passes the functions that are wrapped here. What only
the HTTP application can do is in ``sgl_det.patches.answers``.
"""

from __future__ import annotations

import re
from functools import wraps

from sgl_det.patch import Patch
from sgl_det.patches import logit_processors, seeds
from sgl_det.patches import request_checks as checks


def _verifying(original):
    @wraps(original)
    def verify(self, vocab_size):
        original(self, vocab_size)
        checks.check_ranges(self, vocab_size)

    return verify


def _normalizing(original):
    @wraps(original)
    def normalize_batch_and_arguments(self):
        try:
            self._validate_inputs()
            checks.check_prompt(self)
            self._determine_batch_size()
            checks.check_params(self)
            original(self)
            checks.check_per_prompt(self)
        except checks.MALFORMED as error:
            raise checks.malformed(error) from error

    return normalize_batch_and_arguments


def _validating(original):
    @wraps(original)
    def _validate_one_request(self, obj, input_ids):
        original(self, obj, input_ids)
        checks.check_one(self, obj, input_ids)

    return _validate_one_request


def _creating(original):
    @wraps(original)
    def _create_tokenized_object(self, obj, *args, **kwargs):
        try:
            tokenized = original(self, obj, *args, **kwargs)
        except (re.error, *checks.MALFORMED) as error:
            name = "stop_regex" if isinstance(error, re.error) else "the request"
            raise ValueError(f"{name} is malformed: {str(error)[:200]}") from error
        if isinstance(tokenized, _generating()):
            seeds.settle(obj, tokenized)
            logit_processors.settle(tokenized)
        checks.check_wire(tokenized)
        return tokenized

    return _create_tokenized_object


def _generating() -> type:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

    return TokenizedGenerateReqInput


def _tokenizing(original):
    @wraps(original)
    async def _tokenize_texts(self, texts, is_cross_encoder=False):
        # Splitting megabytes into tokens would block every other client for seconds.
        if not self.allow_auto_truncate and self.tokenizer is not None:
            for text in [texts] if isinstance(texts, str) else texts:
                if isinstance(text, str) and len(text) > checks.longest_text(self):
                    raise ValueError(
                        f"a prompt of {len(text)} characters is longer than the model's context "
                        f"length of {self.context_len} tokens; send a shorter one"
                    )
        return await original(self, texts, is_cross_encoder)

    return _tokenize_texts


def patches() -> tuple[Patch, ...]:
    """The patches of the process that takes requests: an HTTP server, or an Engine."""
    params = "sglang.srt.sampling.sampling_params:SamplingParams.verify"
    request = "sglang.srt.managers.io_struct:GenerateReqInput.normalize_batch_and_arguments"
    manager = "sglang.srt.managers.tokenizer_manager:TokenizerManager"
    rows = (
        (
            ("ranges", params, "3b9a1e9e7e75", _verifying),
            "sampling parameters that the sampler's tensors cannot hold are refused",
        ),
        (
            ("shape", request, "2a0661713b64", _normalizing),
            "parameters of a wrong type, lists of a wrong length and an absurd n are refused",
        ),
        (
            ("text", f"{manager}._tokenize_texts", "06c35bade8d6", _tokenizing),
            "a prompt that cannot fit is refused before seconds are spent on its tokens",
        ),
        (
            ("prompt", f"{manager}._validate_one_request", "d35419e14d93", _validating),
            "tokens outside the vocabulary and features that the server lacks are refused",
        ),
        (
            ("message", f"{manager}._create_tokenized_object", "d5223394888b", _creating),
            "what the scheduler's decoder cannot read, which ends the server, is refused",
        ),
    )
    return tuple(
        Patch(
            name=f"requests.{name}",
            target=target,
            requires="sglang>=0.5.17,<0.5.18",
            fingerprints=(fingerprint,),
            why=why,
            upstream="none: SGLang lets these reach the scheduler, where an exception is fatal",
            wrap=wrap,
        )
        for (name, target, fingerprint, wrap), why in rows
    )
