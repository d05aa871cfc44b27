"""Tiny random-weight checkpoints of every architecture, as Hugging Face directories that can be served over HTTP.

Made from transformers' own configurations, so that its models are the reference. Weights are larger than at the start
of a training, for logits that tell right from wrong. Every model passes its window and original rope length within
128 tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = "Ġ t,h e,i n,Ġ a,r e,o n,Ġt he,e r,Ġ s,a t,o u,e n,n d,Ġ w,i s,o r,Ġ c,e s,i t,Ġ o,in g,a n,Ġ b,a l,Ġ f"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' "
    "+ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
VOCAB_SIZE = len(SPECIAL_TOKENS) + 256 + len(MERGES.split(","))
MAX_LEN = 512


def shape(**changes: Any) -> dict[str, Any]:
    """What the tiny models have in common."""
    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 104,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_LEN,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    return common | changes


def rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10_000.0, **options}


def llama(**changes: Any) -> PreTrainedConfig:
    return transformers.LlamaConfig(**shape(**changes))


LLAMA3_ROPE = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)

TINY_MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama2": lambda: llama(num_key_value_heads=8),
    "llama3": lambda: llama(rope_parameters=LLAMA3_ROPE),
    "llama-biases": lambda: llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama-linear": lambda: llama(max_position_embeddings=64, rope_parameters=rope("linear", factor=4.0)),
    "llama-dynamic": lambda: llama(max_position_embeddings=64, rope_parameters=rope("dynamic", factor=4.0)),
    "llama-yarn": lambda: llama(
        max_position_embeddings=256, rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=64)
    ),
    "mistral": lambda: transformers.MistralConfig(**shape(sliding_window=24, head_dim=16)),
    "qwen2": lambda: transformers.Qwen2Config(**shape(tie_word_embeddings=True)),
    "qwen2-windows": lambda: transformers.Qwen2Config(
        **shape(use_sliding_window=True, sliding_window=24, max_window_layers=1)
    ),
    "qwen3": lambda: transformers.Qwen3Config(**shape(head_dim=24, num_key_value_heads=4, tie_word_embeddings=True)),
    "smollm2": lambda: llama(hidden_size=72, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **shape(
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=24,
            query_pre_attn_scalar=24,
            sliding_window=24,
            layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            tie_word_embeddings=True,
            pad_token_id=0,
        )
    ),
}


def make_tiny_model(name: str, seed: int = 0) -> PreTrainedModel:
    """transformers' own model, float32, with random weights."""
    model = AutoModelForCausalLM.from_config(TINY_MODELS[name](), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in parameter_name:
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(0.15 * noise)
    return model


def save_tiny_model(name: str, directory: Path, seed: int = 0) -> Path:
    """Write the checkpoint, a byte-level tokenizer and a chat template; returns `directory`."""
    model = make_tiny_model(name, seed)
    model.save_pretrained(directory)
    save_tiny_tokenizer(directory)
    return directory


def save_tiny_tokenizer(directory: Path) -> None:
    """Byte-level BPE: any text encodes, and decodes to itself."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [tuple(merge.split(" ")) for merge in MERGES.split(",")]
    tokens = [*SPECIAL_TOKENS, *alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[1],
        "eos_token": SPECIAL_TOKENS[2],
        "model_max_length": MAX_LEN,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
