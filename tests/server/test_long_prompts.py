"""Long prompts on FlashInfer, with wide heads and in any chunks: no crash, no bit changed.

SGLang's deterministic mode overflows FlashInfer's workspace on such prompts, which ends the server,
and never admits them where a chunk is smaller than 4096 tokens. Its normal mode is the control.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import requests

from sgl_det.make_model import make_model
from sgl_det.server_process import ServerProcess, running

pytestmark = [pytest.mark.server, pytest.mark.gpu, pytest.mark.timeout(900)]
CONFIG = {
    **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16"},
    **{"hidden_size": 1536, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 512},
    **{"num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256},
    **{"max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6},
    **{"hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False},
}
FLAGS = ("--max-total-tokens", "100000", "--mem-fraction-static", "0.9", "--skip-server-warmup")
FLAGS = (*FLAGS, "--attention-backend", "flashinfer", "--cuda-graph-max-bs-decode", "4")
CHUNKS = (512, 16384)
TOKENS = 32_000


def bits(url: str) -> str:
    rng = random.Random(0)
    body = {
        "input_ids": [rng.randrange(256) for _ in range(TOKENS)],
        "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
        "return_logprob": True,
    }
    answer = requests.post(f"{url}/generate", json=body, timeout=300).json()
    return json.dumps(answer["meta_info"]["output_token_logprobs"])


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("wide")
    config = folder / "config.json"
    config.write_text(json.dumps(CONFIG))
    return str(make_model(config, folder / "model"))


def servers(module: str, model: str, logs: Path) -> dict[int, ServerProcess]:
    """A server for each size of chunks, not started."""
    return {
        chunk: ServerProcess(
            module,
            ("--model-path", model, *FLAGS, "--chunked-prefill-size", str(chunk)),
            log=logs / f"{chunk}.log",
        )
        for chunk in CHUNKS
    }


def test_a_long_prompt_has_the_same_bits_in_small_and_large_chunks(model, tmp_path):
    ours = servers("sgl_det.launch_server", model, tmp_path)
    with running(ours.values(), 600):
        found = [bits(server.url) for server in ours.values()]
        again = bits(ours[CHUNKS[0]].url)  # with the prefix in the cache
    assert found == [again, again]


def test_control_stock_changes(model, tmp_path):
    stock = servers("sgl_det.stock", model, tmp_path)
    with running(stock.values(), 600):
        small, large = (bits(server.url) for server in stock.values())
    assert small != large
