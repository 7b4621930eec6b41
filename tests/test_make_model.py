"""Made-up models: equal bytes for equal (config, seed), and checkpoints that transformers loads."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open

from sgl_det.cli import main
from sgl_det.make_model import SHAPES, make_model, shapes, tokenizer, writer
from sgl_det.testing import assert_bitwise_equal

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "vocab_size": 400,
}
# Every optional tensor of every family, present and absent.
CONFIGS = {
    "qwen3": {"model_type": "qwen3"},
    "qwen3-tied": {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3-bias": {"model_type": "qwen3", "attention_bias": True},
    "qwen2": {"model_type": "qwen2", "torch_dtype": "float16"},
    "llama": {"model_type": "llama", "torch_dtype": "float32"},
    "llama-bias": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "gemma2": {"model_type": "gemma2", "tie_word_embeddings": True, "sliding_window": 64},
}


@pytest.fixture
def config(tmp_path):
    """Writes a small config.json and gives its path."""

    def write(**fields):
        folder = tmp_path / "config"
        folder.mkdir(exist_ok=True)
        path = folder / "config.json"
        content = {"model_type": "qwen3", "tie_word_embeddings": False} | SMALL | fields
        family = shapes.FAMILIES.get(content["model_type"], "Nothing")
        path.write_text(json.dumps({"architectures": [family]} | content))
        return path

    return write


def digests(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def tensors(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def test_equal_seed_gives_equal_bytes_and_another_seed_other_weights(config, tmp_path):
    path = config()
    first, second = (digests(make_model(path, tmp_path / n, seed=3)) for n in "ab")
    other = digests(make_model(path, tmp_path / "c", seed=4))
    assert first == second
    assert first["model.safetensors"] != other["model.safetensors"]
    assert first["config.json"] == other["config.json"]


def test_bytes_do_not_depend_on_the_process(config, tmp_path):
    path = config()
    here = make_model(path, tmp_path / "here", seed=1)
    there = tmp_path / "there"
    command = [sys.executable, "-m", "sgl_det.cli", "make-model", str(path), str(there)]
    done = subprocess.run([*command, "--seed", "1"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(there)
    assert digests(here) == digests(there)


@pytest.mark.gpu
def test_a_gpu_writes_the_bytes_of_a_cpu(config, tmp_path):
    path = config()
    cpu, cuda = (make_model(path, tmp_path / d, device=d) for d in ("cpu", "cuda"))
    assert digests(cpu) == digests(cuda)


def test_shards_hold_the_same_tensors_and_a_valid_index(config, tmp_path):
    path = config()
    one = make_model(path, tmp_path / "one")
    many = make_model(path, tmp_path / "many", shard_bytes=40_000)
    index = json.loads((many / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in many.glob("*.safetensors"))
    assert len(files) > 2 and sorted(set(index["weight_map"].values())) == files
    for name, file in index["weight_map"].items():
        with safe_open(many / file, "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118
    a, b = tensors(one), tensors(many)
    assert a.keys() == b.keys() == index["weight_map"].keys()
    for name in a:
        assert_bitwise_equal(a[name], b[name])
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in a.values())


@pytest.mark.parametrize("case", CONFIGS)
def test_transformers_loads_every_family(case, config, tmp_path):
    from transformers import AutoModelForCausalLM

    out = make_model(config(**CONFIGS[case]), tmp_path / "model")
    kwargs = {"dtype": "auto", "output_loading_info": True}
    model, report = AutoModelForCausalLM.from_pretrained(out, **kwargs)
    assert not any(report.values()), report
    stored = tensors(out)
    tied = model.config.tie_word_embeddings
    state = {k: v for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}
    assert state.keys() == stored.keys()
    for name in state:
        assert_bitwise_equal(state[name], stored[name])
    with torch.inference_mode():
        logits = model(torch.arange(40)[None]).logits
    assert torch.isfinite(logits).all() and logits.std() > 0.5


@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes_are_what_transformers_expects(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    _, content = shapes.load_config(name)
    fields = {k: v for k, v in content.items() if k != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(content["model_type"], **fields)
        )
    expected = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    if content["tie_word_embeddings"]:
        expected.pop("lm_head.weight")
    assert {p.name: p.shape for p in shapes.parameters(content)} == expected


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return make_model("demo", tmp_path_factory.mktemp("models") / "demo")


def test_tokenizer_round_trip_and_chat_template(demo):
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(demo)
    for text in ("Hello, world!\n", " two  spaces\t", "grüße 東京 🙂", "\x00\x7f", "a" * 3000):
        ids = loaded.encode(text, add_special_tokens=False)
        assert ids == list(text.encode())
        assert loaded.decode(ids) == text
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    text = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = loaded.encode(text, add_special_tokens=False)
    assert ids.count(tokenizer.IM_START) == 3 and ids.count(tokenizer.IM_END) == 2
    assert loaded.eos_token_id == tokenizer.EOS and loaded.pad_token_id == tokenizer.PAD


def test_every_id_of_a_large_vocabulary_decodes_to_its_own_text(tmp_path):
    from transformers import PreTrainedTokenizerFast

    size = 151936
    tokenizer.write_tokenizer(tmp_path, size, 4096)
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert len(loaded) == size
    words = loaded.batch_decode([[i] for i in range(tokenizer.SMALLEST_VOCAB, size)])
    assert len(set(words)) == len(words) and all(w.isprintable() and w[1:] for w in words)
    assert loaded.decode(range(200, 300))


def test_greedy_text_varies_and_does_not_end(demo):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32)
    prompt = torch.tensor([list(b"What is two plus two?")])
    made = model.generate(prompt, max_new_tokens=48, do_sample=False)[0, prompt.shape[1] :]
    assert len(made) == 48 and len(set(made.tolist())) > 24
    assert not set(made.tolist()) & set(tokenizer.quiet_ids())


def test_one_rounding_changes_the_demo_s_logits(demo):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32)
    with torch.inference_mode():
        x = model.model.embed_tokens(torch.arange(100)[None])
        moved = model(inputs_embeds=x * (1 + 2**-23)).logits - model(inputs_embeds=x).logits
    assert moved.abs().max() > 1e-3


def test_a_complete_model_is_kept_and_anything_else_is_refused(config, tmp_path):
    path, out = config(), tmp_path / "model"
    make_model(path, out, seed=5)
    before = (out / "model.safetensors").stat().st_mtime_ns
    assert make_model(path, out, seed=5) == out
    assert (out / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(FileExistsError, match="another seed"):
        make_model(path, out, seed=6)
    with pytest.raises(FileExistsError, match="another config_sha256"):
        make_model(config(hidden_size=128), out, seed=5)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="not a made-up model"):
        make_model(path, mine)
    assert (mine / "notes.txt").read_text() == "keep"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert (make_model(path, empty) / writer.RECORD).is_file()


def test_nothing_is_left_of_a_model_that_failed(config, tmp_path, monkeypatch):
    def fail(*args):
        raise OSError("no space")

    monkeypatch.setattr(writer, "_write_tensor", fail)
    with pytest.raises(OSError, match="no space"):
        make_model(config(), tmp_path / "out" / "model")
    assert list((tmp_path / "out").iterdir()) == []


def test_full_disk_is_one_sentence(config, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"GB free and the model takes"):
        make_model(config(), tmp_path / "model")


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'"),
        ({"vocab_size": 100}, "vocab_size is 100"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"torch_dtype": "int8"}, "dtype is 'int8'"),
        ({"sgl_det": {"loudness": 1}}, "loudness"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_unusable_configs_are_refused(fields, words, config, tmp_path, capsys):
    path = config(**fields)
    with pytest.raises(ValueError, match=words):
        make_model(path, tmp_path / "model")
    assert main(["make-model", str(path), str(tmp_path / "model")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("sgl-det make-model: ") and error.count("\n") == 1


def test_missing_config_names_the_shapes(tmp_path):
    with pytest.raises(ValueError, match="qwen3-8b"):
        make_model(tmp_path / "nowhere", tmp_path / "model")
