"""The byte tokenizer of made-up models: ids 0..255 are bytes, then specials, then words.

Ids     0..255 the byte of that value · 256.. SPECIALS · the rest, up to the vocabulary size, words
Encode  bytes and specials only: the words are in no merge, so text never becomes one
Decode  every id of the vocabulary decodes, words to distinct printable text
"""

from __future__ import annotations

import json
from pathlib import Path

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
EOS, IM_START, IM_END, PAD = range(256, 260)
SMALLEST_VOCAB = 256 + len(SPECIALS)

_SYLLABLES = tuple(c + v for c in "bdfghjklmnprst" for v in "aeiou")

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def quiet_ids() -> list[int]:
    """Ids that greedy text should rarely show: specials, and bytes that are not printable ASCII."""
    bytes_ = [b for b in range(256) if b != 0x0A and not 0x20 <= b < 0x7F]
    return bytes_ + [EOS, IM_START, IM_END, PAD]


def write_tokenizer(folder: Path, vocab_size: int, max_length: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` for ids 0..vocab_size-1."""
    text = json.dumps(_tokenizer(vocab_size), ensure_ascii=False, separators=(",", ":"))
    (folder / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIALS[0],
        "pad_token": SPECIALS[3],
        "chat_template": _CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    text = json.dumps(settings, indent=2)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _tokenizer(vocab_size: int) -> dict:
    byte_chars = _byte_characters()
    vocab = {byte_chars[b]: b for b in range(256)}
    for i, special in enumerate(SPECIALS):
        vocab[special] = 256 + i
    for i in range(vocab_size - SMALLEST_VOCAB):
        vocab[byte_chars[0x20] + _word(i)] = SMALLEST_VOCAB + i
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special(256 + i, text) for i, text in enumerate(SPECIALS)],
        "normalizer": None,
        "pre_tokenizer": byte_level | {"use_regex": True},
        "post_processor": None,
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    }


def _special(token_id: int, text: str) -> dict:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": text, **flags, "special": True}


def _byte_characters() -> list[str]:
    """The character that byte-level BPE files write for each byte."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {b: chr(b) for b in shown}
    hidden = (b for b in range(256) if b not in table)
    table |= {b: chr(0x100 + i) for i, b in enumerate(hidden)}
    return [table[b] for b in range(256)]


def _word(index: int) -> str:
    """The index-th word: bijective base-70 digits, so that all words differ."""
    word, base = "", len(_SYLLABLES)
    index += 1
    while index:
        index, digit = divmod(index - 1, base)
        word = _SYLLABLES[digit] + word
    return word
