"""Each refusal, provoked on arguments that SGLang itself has resolved, without a server.

Longer than 300 lines because SGLang, whose import takes half a minute, is imported once for all.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import pytest

from sgl_det.argument_table import TABLE
from sgl_det.axis import Axis
from sgl_det.backend import BACKENDS
from sgl_det.model_rules import MODEL_RULES
from sgl_det.refusals import VARIABLES, judge
from support import GPU_BACKENDS

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


@dataclass
class Limits:
    """Stands in for a Backend, so that these tests do not follow its numbers."""

    name: str = "torch_native"
    head_dims: frozenset[int] | None = None
    dtypes: frozenset[str] = frozenset({"bfloat16", "float16", "float32"})
    windows: bool = False
    caps: bool = False
    split_tokens: dict[str, int | None] | None = None

    def __post_init__(self):
        self.split_tokens = self.split_tokens or {}


@pytest.fixture(scope="module", autouse=True)
def sglang():
    """SGLang, imported once; resolution writes to the environment, which is put back."""
    from sgl_det.environment import use_cpu_if_no_gpu

    with mock.patch.dict(os.environ):
        use_cpu_if_no_gpu()
        import sglang.srt.server_args as module

        for add in (
            module.add_deterministic_attention_backend_choices,
            module.add_radix_supported_deterministic_attention_backend_choices,
        ):
            add(["torch_native"])
        yield module


@pytest.fixture
def resolve(tmp_path, sglang):
    """Make ``ServerArgs`` for a model config, resolved; no weights are needed for that."""

    def make(config=(), **kwargs):
        fields = QWEN3 | dict(config)
        # SGLang remembers a config by its path, so each one gets its own folder.
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(fields))
        given = {"device": "cpu", "attention_backend": "torch_native"} | kwargs
        return sglang.ServerArgs(
            **({"model_path": str(folder), "enable_deterministic_inference": True} | given)
        )

    return make


def judged(server_args, limits=None, environ=None, allow=()):
    limits = limits or Limits(name=server_args.attention_backend)
    return judge(
        server_args, server_args.get_model_config(), limits, environ or {}, frozenset(allow)
    )


def names_of(judgement):
    return [refusal.name for refusal in judgement.refusals]


@contextmanager
def h200(sglang):
    """Make SGLang resolve as on an H200: the only facts it asks the machine for are these."""
    import sglang.srt.utils as utils

    with (
        mock.patch.object(utils, "is_cuda", lambda: True),
        mock.patch.object(sglang, "is_cuda", lambda: True),
        mock.patch.object(sglang, "is_sm90_supported", lambda *_: True),
        mock.patch.object(sglang, "get_device_memory_capacity", lambda *_: 141 * 1024),
    ):
        yield


def test_plain_launch_on_a_cpu(resolve):
    args = resolve()
    judgement = judged(args, BACKENDS["torch_native"], environ=os.environ)
    assert judgement.refusals == () and judgement.lifted == () and judgement.dropped == {}


@pytest.mark.parametrize("name", GPU_BACKENDS)
def test_plain_launch_on_a_gpu(resolve, sglang, name):
    with h200(sglang):
        args = resolve(device="cuda", attention_backend=name)
    assert args.chunked_prefill_size == 8192
    assert args.cuda_graph_config.decode.backend == "full"
    assert args.cuda_graph_config.prefill.backend == "breakable"
    judgement = judged(args, BACKENDS[name])
    assert judgement.refusals == () and judgement.dropped == {}


def test_plain_launch_with_what_people_set(resolve):
    args = resolve(
        port=1234,
        api_key="secret",
        max_running_requests=40,
        max_total_tokens=20000,
        chunked_prefill_size=48,
        mem_fraction_static=0.3,
        schedule_policy="lpm",
        disable_radix_cache=True,
        disable_overlap_schedule=True,
        skip_server_warmup=True,
        context_length=1000,
        random_seed=3,
        dtype="float32",
        kv_cache_dtype="auto",
        enable_metrics=True,
        log_level="error",
        stream_interval=8,
        tool_call_parser="qwen25",
    )
    assert judged(args).refusals == ()


# Arguments that SGLang resolves on any machine for a dense model: what it makes of them is judged.
RESOLVED = {
    "bf16_gemm_backend": {"bf16_gemm_backend": "cutedsl"},
    "cpu_offload_gb": {"cpu_offload_gb": 1},
    "debug_tensor_dump_output_folder": {"debug_tensor_dump_output_folder": "/tmp/x"},
    "decode_attention_backend": {"decode_attention_backend": "triton"},
    "detokenizer_worker_num": {"detokenizer_worker_num": 2},
    "dp_size": {"dp_size": 2},
    "enable_fp32_lm_head": {"enable_fp32_lm_head": True},
    "enable_hierarchical_cache": {"enable_hierarchical_cache": True},
    "enable_lora": {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["q_proj"]},
    "enable_mixed_chunk": {"enable_mixed_chunk": True},
    "enable_nccl_nvls": {"enable_nccl_nvls": True},
    "enable_return_hidden_states": {"enable_return_hidden_states": True},
    "enable_symm_mem": {"enable_symm_mem": True},
    "enable_torch_compile": {"enable_torch_compile": True},
    "enable_two_batch_overlap": {"enable_two_batch_overlap": True, "moe_a2a_backend": "deepep"},
    "forward_hooks": {"forward_hooks": [{"name": "x"}]},
    "is_embedding": {"is_embedding": True},
    "kv_canary": {"kv_canary": "log"},
    "kv_cache_dtype": {"kv_cache_dtype": "fp8_e5m2"},
    "load_format": {"load_format": "sharded_state"},
    "model_impl": {"model_impl": "transformers"},
    "nnodes": {"nnodes": 2, "tp_size": 2, "dist_init_addr": "localhost:1"},
    "page_size": {"page_size": 16},
    "pp_size": {"pp_size": 2},
    "prefill_attention_backend": {"prefill_attention_backend": "triton"},
    "quantization": {"quantization": "fp8"},
    "radix_cache_backend": {"radix_cache_backend": "mine"},
    "rl_on_policy_target": {"rl_on_policy_target": "fsdp"},
    "speculative_algorithm": {
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": 4,
    },
    "tokenizer_worker_num": {"tokenizer_worker_num": 2},
    "torchao_config": {"torchao_config": "int8wo"},
    "tp_size": {"tp_size": 2},
    "triton_attention_reduce_in_fp32": {"triton_attention_reduce_in_fp32": True},
}


@pytest.mark.parametrize("name", RESOLVED)
def test_refused_as_resolved(resolve, name):
    judgement = judged(resolve(**RESOLVED[name]))
    assert name in names_of(judgement)


# SGLang wants a GPU, other packages or another model before it resolves most of these, so the
# record of a plain launch is changed through SGLang's own ``override``.
_VALUES: dict[str, object] = {
    "device": "hpu",
    "enable_deterministic_inference": False,
    "attention_backend": "intel_amx",
    "sampling_backend": "flashinfer",
    "disaggregation_mode": "prefill",
    "decoupled_spec_role": "drafter",
    "weight_cache_mode": "daemon",
    "cuda_graph_config": mock.Mock(decode=mock.Mock(backend="breakable")),
    "lora_paths": ["a"],
    "custom_weight_loader": ["a.b"],
}


def _other_value(name, value):
    if name in _VALUES:
        return _VALUES[name]
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else "other"


@pytest.mark.parametrize("name", [n for n, rule in TABLE.items() if rule.can_refuse])
def test_refused_by_name(resolve, name):
    args = resolve()
    value = 8 if name == "chunked_prefill_size" else _other_value(name, getattr(args, name))
    limits = Limits(name="triton" if name == "chunked_prefill_size" else args.attention_backend)
    if name == "chunked_prefill_size":
        args.override("test", attention_backend="triton")
    args.override("test", **{name: value})
    found = {r.name: r.sentence for r in judged(args, limits).refusals}
    sentence = found[name]
    assert sentence.startswith(f"--{name.replace('_', '-')} is ")
    assert TABLE[name].reason in sentence and "\n" not in sentence
    assert (f"--det-allow {name}" in sentence) == TABLE[name].liftable


def test_argument_without_a_verdict_is_refused(resolve):
    args = resolve(port=1)
    with mock.patch.dict(TABLE):
        del TABLE["port"]
        (refusal,) = judged(args).refusals
        assert refusal.name == "port" and "no verdict" in refusal.sentence
        assert judged(args, allow={"port"}).lifted == ("port",)
        args = resolve()
        assert judged(args).refusals == ()


MODELS = {
    "architecture": {"architectures": ["GPT2LMHeadModel"]},
    "mixture_of_experts": {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8},
    "hybrid_attention": {"layer_types": ["linear_attention", "full_attention"]},
    "quantization": {"quantization_config": {"quant_method": "fp8"}},
    "logit_softcap": {"attn_logit_softcapping": 50.0},
    "rope": {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
    "sliding_window": {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 0},
}


@pytest.mark.parametrize("name", MODELS)
def test_refused_model(resolve, name):
    args = resolve()
    config = args.get_model_config()
    # Set on the config that SGLang read: SGLang refuses some of these before our turn.
    for target in (config.hf_config, config.hf_text_config):
        for field, value in MODELS[name].items():
            setattr(target, field, value)
    if name == "rope":
        config.hf_text_config.rope_parameters = MODELS[name]["rope_scaling"]
    if name == "sliding_window":
        config.sliding_window_size = 128
    refusals = judged(args).refusals
    assert [r.name for r in refusals] == [name]
    rule = next(rule for rule in MODEL_RULES if rule.name == name)
    assert (f"--det-allow {name}" in refusals[0].sentence) == rule.liftable
    assert "\n" not in refusals[0].sentence
    assert (judged(args, allow={name}).refusals == ()) == rule.liftable


def test_what_would_end_the_server_cannot_be_lifted():
    """A backend's wrappers and kernels raise on these: a server would not start, or would end."""
    held = {rule.name for rule in MODEL_RULES if not rule.liftable}
    assert held == {"head_dim", "sliding_window", "logit_softcap"}


@pytest.mark.parametrize(
    "name, field, value",
    [
        ("multimodal", "is_multimodal", True),
        ("embedding", "is_generation", False),
        ("attention_sinks", "has_attention_sinks", True),
        ("mla", "attention_arch", mock.Mock()),
        ("head_dim", "v_head_dim", 64),
    ],
)
def test_refused_kind_of_model(resolve, name, field, value):
    args = resolve()
    setattr(args.get_model_config(), field, value)
    if name == "mla":
        value.name = "MLA"
    assert names_of(judged(args)) == [name]


def test_every_model_rule_is_provoked():
    other = {"multimodal", "embedding", "attention_sinks", "mla", "head_dim"}
    limits = {"model_dtype"}
    assert {rule.name for rule in MODEL_RULES} == MODELS.keys() | other | limits


def test_kind_of_model_is_named_once(resolve):
    args = resolve()
    config = args.get_model_config()
    config.hf_config.architectures, config.is_multimodal = ["LlavaForConditionalGeneration"], True
    assert names_of(judged(args)) == ["multimodal"]
    assert names_of(judged(args, allow={"multimodal"})) == []


def test_limits_of_a_backend(resolve):
    args = resolve(dtype="float32")
    limits = Limits(head_dims=frozenset({64}), dtypes=frozenset({"bfloat16"}))
    assert names_of(judged(args, limits)) == ["model_dtype", "head_dim"]
    assert names_of(judged(args, Limits(head_dims=frozenset({128})))) == []


def test_backend_that_holds_capped_logits(resolve):
    args = resolve()
    args.get_model_config().hf_text_config.attn_logit_softcapping = 50.0
    assert names_of(judged(args)) == ["logit_softcap"]
    assert names_of(judged(args, Limits(caps=True))) == []


def test_backend_that_holds_windows(resolve):
    args = resolve()
    args.get_model_config().sliding_window_size = 128
    assert names_of(judged(args)) == ["sliding_window"]
    assert names_of(judged(args, Limits(windows=True))) == []


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize("chunk", [-1, 1, 512, 16384])
def test_chunks_of_any_size(resolve, backend, chunk):
    """SGLang's deterministic mode never admits a long prompt where a chunk is below 4096."""
    args = resolve(device="cuda", attention_backend=backend, chunked_prefill_size=chunk)
    assert judged(args).refusals == ()


@pytest.mark.parametrize("name", VARIABLES)
def test_refused_variable(resolve, name):
    args = resolve()
    assert judged(args, environ=dict.fromkeys(VARIABLES[name].harmless, "")).refusals == ()
    for value in VARIABLES[name].harmless:
        assert judged(args, environ={name: value.upper()}).refusals == ()
    (refusal,) = judged(args, environ={name: "3"}).refusals
    assert refusal.name == name and name in refusal.sentence


def test_lifting_drops_every_claim(resolve):
    judgement = judged(resolve(enable_mixed_chunk=True), allow={"enable-mixed-chunk"})
    assert judgement.refusals == ()
    assert judgement.lifted == ("enable_mixed_chunk",)
    assert set(judgement.dropped) == set(Axis)
    assert "enable_mixed_chunk was allowed" in judgement.dropped[Axis.BATCH_SIZE]


def test_lifting_drops_only_what_it_touches(resolve):
    environ = {"SGLANG_ROPE_CACHE_FP32": "1"}
    judgement = judged(resolve(), environ=environ, allow={"SGLANG_ROPE_CACHE_FP32"})
    assert judgement.refusals == () and set(judgement.dropped) == {Axis.RESTART}


def test_lifting_what_is_not_met_changes_nothing(resolve):
    judgement = judged(resolve(), allow={"tp_size"})
    assert judgement.refusals == () and judgement.lifted == () and judgement.dropped == {}


def test_lifting_one_leaves_the_others(resolve):
    args = resolve(enable_mixed_chunk=True, page_size=16)
    assert names_of(judged(args, allow={"page_size"})) == ["enable_mixed_chunk"]


def test_unknown_name_is_refused(resolve):
    (refusal,) = judged(resolve(), allow={"tpsize"}).refusals
    assert "--det-allow tpsize" in refusal.sentence and "did you mean tp_size?" in refusal.sentence


def test_what_would_crash_cannot_be_lifted(resolve):
    args = resolve()
    args.override("test", smg_grpc_mode=True)
    assert names_of(judged(args, allow={"smg_grpc_mode"})) == ["smg_grpc_mode"] * 2


@pytest.mark.parametrize(
    "argument, axes",
    [
        ({"allow_auto_truncate": True}, {Axis.RESTART}),
        ({"grammar_backend": "outlines"}, {Axis.STRUCTURED}),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_not_claimed_starts_with_fewer_claims(resolve, argument, axes):
    judgement = judged(resolve(**argument))
    assert judgement.refusals == () and set(judgement.dropped) == axes
