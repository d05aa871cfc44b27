"""Tiny GGUF files, written with the gguf package: every supported architecture, weight type and tokenizer family."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from workers.gguf_tokenizer import CONTROL, SPACE, UNKNOWN, USER_DEFINED, byte_spelling

Q = gguf.GGMLQuantizationType
TYPES = (Q.Q4_0, Q.Q4_1, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.Q8_0, Q.F16, Q.BF16, Q.F32, Q.Q5_0, Q.Q5_1)
NORMAL, BYTE = 1, 6
WIDTH = 256  # K quants come in blocks of 256

WORDS = ["▁t", "he", "in", "er", "an", "on", "re", "▁a", "at", "en", "nd", "▁the", "▁th", "is", "▁o", "ou", "▁w", "ing"]
WORDS += ["▁▁", "▁▁▁▁", "\n\n", "한", "日本", "é"]
MERGES = ["Ġ t", "h e", "i n", "Ġ a", "r e", "Ġt he", "e r", "in g", "a t", "Ã ©", "Ġ Ġ", "ĠĠ ĠĠ", "1 2", "ð Ł", "Ċ Ċ"]


@dataclass(frozen=True)
class TinyGguf:
    architecture: str
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 32
    num_layers: int = 2
    tied: bool = False
    bias: bool = False
    metadata: tuple[tuple[str, Any], ...] = ()


TINY_GGUFS = {
    "llama": TinyGguf("llama"),
    "qwen2": TinyGguf("qwen2", bias=True, tied=True),
    "qwen3": TinyGguf("qwen3", num_heads=4, num_kv_heads=2, head_dim=128, tied=True),
    "gemma3": TinyGguf("gemma3", num_heads=4, num_kv_heads=1, head_dim=64, tied=True, num_layers=7),
}


def byte_level_vocabulary(pre: str) -> dict[str, Any]:
    tokens = ["<|bos|>", "<|eos|>", "<think>", *byte_spelling(), *(merge.replace(" ", "") for merge in MERGES)]
    kinds = [CONTROL, CONTROL, USER_DEFINED] + [NORMAL] * (len(tokens) - 3)
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": kinds,
        "merges": MERGES,
        "add_bos_token": False,
    }


def sentencepiece_vocabulary(*, gemma: bool) -> dict[str, Any]:
    letters = [chr(c) for c in range(33, 127)] + [SPACE, "\n"]
    words = [w.replace(SPACE, " ") if gemma and not w.strip(SPACE) else w for w in WORDS]
    tokens = ["<unk>", "<bos>", "<eos>", "<extra>", *(f"<0x{i:02X}>" for i in range(256)), *words, *letters]
    kinds = [UNKNOWN, CONTROL, CONTROL, USER_DEFINED] + [BYTE] * 256 + [NORMAL] * (len(words) + len(letters))
    if gemma:
        kinds = [USER_DEFINED if " " in t and not t.strip() else k for t, k in zip(tokens, kinds, strict=True)]
    scores = [0.0] * 260 + [-float(i // 2) for i in range(len(tokens) - 260)]  # some scores are equal
    return {
        "model": "llama",
        "tokens": tokens,
        "token_type": kinds,
        "scores": scores,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


def write_tiny_gguf(path: Path, name: str, vocabulary: dict[str, Any], **metadata: Any) -> Path:
    """`metadata` keys are relative to the architecture, with "__" for "."."""
    spec = TINY_GGUFS[name]
    writer = gguf.GGUFWriter(path, spec.architecture)
    writer.add_name("tiny")
    writer.add_context_length(512)
    writer.add_block_count(spec.num_layers)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if spec.architecture == "llama":
        writer.add_rope_dimension_count(spec.head_dim)
    if spec.architecture == "gemma3":
        writer.add_sliding_window(24)
    for key, value in metadata.items():
        _add(writer, f"{spec.architecture}.{key.replace('__', '.')}", value)
    for key, value in {"bos_token_id": 0, "eos_token_id": 1, **vocabulary}.items():
        _add(writer, f"tokenizer.ggml.{key}", value)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    _add_tensors(writer, spec, len(vocabulary["tokens"]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_tensors(writer: gguf.GGUFWriter, spec: TinyGguf, vocab_size: int) -> None:
    rng = np.random.default_rng(0)
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    matrices = {"token_embd": (vocab_size, WIDTH)} | ({} if spec.tied else {"output": (vocab_size, WIDTH)})
    vectors = {"output_norm.weight": WIDTH}
    for layer in range(spec.num_layers):
        blk = f"blk.{layer}."
        matrices |= {blk + "attn_q": (q, WIDTH), blk + "attn_k": (kv, WIDTH), blk + "attn_v": (kv, WIDTH)}
        matrices |= {blk + "attn_output": (WIDTH, q)}
        matrices |= {blk + f"ffn_{part}": (WIDTH, WIDTH) for part in ("gate", "up", "down")}
        norms = ["attn_norm", "ffn_norm"]
        if spec.architecture == "gemma3":
            norms += ["post_attention_norm", "post_ffw_norm"]
        vectors |= {f"{blk}{norm}.weight": WIDTH for norm in norms}
        if spec.architecture in ("qwen3", "gemma3"):
            vectors |= {f"{blk}attn_{x}_norm.weight": spec.head_dim for x in "qk"}
        if spec.bias:
            vectors |= {blk + "attn_q.bias": q, blk + "attn_k.bias": kv, blk + "attn_v.bias": kv}
    for name, size in vectors.items():
        writer.add_tensor(name, (1.0 + 0.1 * rng.standard_normal(size)).astype(np.float32))
    for index, (name, shape) in enumerate(matrices.items()):
        kind = TYPES[index % len(TYPES)]
        writer.add_tensor(f"{name}.weight", random_rows(rng, shape, kind), raw_dtype=kind)


def random_rows(rng: np.random.Generator, shape: tuple[int, int], kind: gguf.GGMLQuantizationType) -> NDArray[Any]:
    """Rows as a file of that type stores them. K quants, which the package cannot make, are random bits."""
    if kind not in (Q.Q4_K, Q.Q5_K, Q.Q6_K):
        values = (0.1 * rng.standard_normal(shape)).astype(np.float32)
        return values if kind == Q.F32 else gguf.quants.quantize(values, kind)
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // 256, block_bytes), dtype=np.uint8)
    scale = np.array([0.002], dtype=np.float16).view(np.uint8)
    if kind == Q.Q6_K:
        blocks[..., -2:] = scale
    else:
        blocks[..., 0:2] = blocks[..., 2:4] = scale
    return blocks.reshape(shape[0], -1)
