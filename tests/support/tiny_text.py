"""A tokenizer small enough to reason about: one id per byte (id = byte value), a few merges, special tokens."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cluster.text.tokenizer import _ALPHABET

MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w")]
EOS, IM_START, IM_END = "<eos>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_tiny_tokenizer(directory: Path) -> Path:
    """Ids 0 to 255 are the bytes, then the merges, then the special tokens."""
    vocab = dict(_ALPHABET)
    for left, right in MERGES:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in (EOS, IM_START, IM_END)])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"chat_template": CHAT_TEMPLATE, "eos_token": EOS, "bos_token": {"content": IM_START}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
