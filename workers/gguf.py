"""A Hugging Face directory from a GGUF file: config.json, model.safetensors, tokenizer.

Dequantises (numpy, from the gguf package) a few rows at a time, so that memory stays small whatever the model's size.
Values that the file quantises become float32; float32, float16 and bfloat16 keep their type. Knows no cache: where the
directory lives and who else wants it is `workers.prepare`'s business.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from configs.model_spec import MODEL_TYPES
from workers.gguf_file import GgufFile, GgufTensor
from workers.gguf_tokenizer import tokenizer_config, tokenizer_json

CHUNK_ELEMENTS = 1 << 21
STORED = {gguf.GGMLQuantizationType.F16: "F16", gguf.GGMLQuantizationType.BF16: "BF16"}
DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
GEMMA3_MODULES = {
    **MODULES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
TOP_MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor of the safetensors file to be written."""

    name: str
    source: GgufTensor
    dtype: str  # of safetensors
    row_order: NDArray[np.int64] | None  # None: as they come
    offset: float  # added to every value

    @property
    def num_bytes(self) -> int:
        return math.prod(self.source.shape) * (4 if self.dtype == "F32" else 2)


def convert_gguf(path: Path, directory: Path) -> None:
    """Fill the existing, empty `directory`. ValueError: an architecture, tensor or tokenizer that is not supported."""
    with GgufFile(path) as file:
        config = model_config(file)
        tensors = list(plan_tensors(file, config))
        config["dtype"] = _checkpoint_dtype(tensors)
        metadata = file.metadata
        _write_json(directory / "tokenizer.json", tokenizer_json(metadata))
        max_len = config["max_position_embeddings"]
        _write_json(directory / "tokenizer_config.json", tokenizer_config(metadata, max_len))
        _write_json(directory / "config.json", config, indent=2)
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id") if config[key] is not None}
        _write_json(directory / "generation_config.json", ids, indent=2)
        write_safetensors(directory / "model.safetensors", file, tensors)


def model_config(file: GgufFile) -> dict[str, Any]:
    """The config.json that describes this file's model."""
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{file.path}: architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    if metadata.get("split.count", 1) > 1:
        raise ValueError(f"{file.path} is one part of a split GGUF file; merge its parts into one file first")

    def value(key: str, default: Any = None) -> Any:
        found = metadata.get(f"{architecture}.{key}", default)
        if found is None:
            raise ValueError(f"{file.path} lacks the metadata key {architecture}.{key}")
        return found

    num_heads, hidden_size = value("attention.head_count"), value("embedding_length")
    window = metadata.get(f"{architecture}.attention.sliding_window")
    model_type = "mistral" if architecture == "llama" and window else ARCHITECTURES[architecture]
    head_dim = value("attention.key_length", hidden_size // num_heads)
    config = {
        "architectures": [MODEL_TYPES[model_type]],
        "model_type": model_type,
        "hidden_size": hidden_size,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": value("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": value("context_length"),
        # Stored as float32; the shortest decimal that means the same float32 is what the checkpoint's author wrote.
        "rms_norm_eps": float(str(np.float32(value("attention.layer_norm_rms_epsilon")))),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "rope_theta": value("rope.freq_base", 1e6 if architecture == "gemma3" else 1e4),
        "rope_scaling": _rope_scaling(file, architecture, head_dim),
    }
    if model_type == "mistral":
        config["sliding_window"] = window
    if architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if architecture == "gemma3":
        config |= _gemma3_config(config, metadata, window)
    return config


def _gemma3_config(config: Mapping[str, Any], metadata: Mapping[str, Any], window: int | None) -> dict[str, Any]:
    """What the files leave out is the same for all sizes, but for the 27B model's query scale (its 62 layers tell)."""
    largest = config["num_hidden_layers"] == 62
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": window,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if largest else 256,
        "rope_local_base_freq": metadata.get("gemma3.rope.freq_base_swa", 1e4),
        "final_logit_softcapping": metadata.get("gemma3.final_logit_softcapping"),
    }


def _rope_scaling(file: GgufFile, architecture: str, head_dim: int) -> dict[str, Any] | None:
    metadata, prefix = file.metadata, f"{architecture}.rope.scaling."
    kind = metadata.get(prefix + "type", "none")
    if ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, metadata[f"{architecture}.rope.freq_base"], head_dim)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(f"{file.path}: rope scaling {kind!r} is not supported; supported: linear, yarn, llama3")
    scaling = {"rope_type": kind, "factor": metadata[prefix + "factor"]}
    if original := metadata.get(prefix + "original_context_length"):
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling is stored as its effect, one divisor per frequency; this finds the parameters behind it."""
    divisors = file.rows(file.tensors[ROPE_FACTORS], np.array([0])).reshape(-1)
    base = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    factor = round(float(divisors.max()), 4)
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    blend = np.clip((8192 * base / (2 * np.pi) - 1.0) / 3.0, 0.0, 1.0)
    expected = 1.0 / ((1 - blend) / factor + blend)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise ValueError(f"{file.path}: the divisors in {ROPE_FACTORS} are not those of Llama 3's rope scaling")
    return scaling


def plan_tensors(file: GgufFile, config: Mapping[str, Any]) -> Iterator[PlannedTensor]:
    """Every tensor of the file under its Hugging Face name. ValueError: one that the architecture does not know."""
    gemma = config["model_type"] == "gemma3_text"
    permuted = file.metadata["general.architecture"] == "llama"
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, tensor in file.tensors.items():
        if name == ROPE_FACTORS:
            continue
        _check_type(file.path, tensor)
        module, _, kind = name.rpartition(".")
        block = module.split(".")[-1]
        row_order = _half_split_order(tensor.shape[0], heads[block]) if permuted and block in heads else None
        yield PlannedTensor(
            name=f"{_module_name(file.path, module, gemma)}.{kind}",
            source=tensor,
            dtype=STORED.get(tensor.kind, "F32"),
            row_order=row_order,
            offset=-1.0 if gemma and block.endswith("norm") else 0.0,
        )


def _module_name(path: Path, module: str, gemma: bool) -> str:
    if module in TOP_MODULES:
        return TOP_MODULES[module]
    known = GEMMA3_MODULES if gemma else MODULES
    match module.split("."):
        case ["blk", layer, block] if block in known:
            return f"model.layers.{layer}.{known[block]}"
    raise ValueError(f"{path}: tensor {module} is not part of a supported architecture")


def _check_type(path: Path, tensor: GgufTensor) -> None:
    floats = (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
    if tensor.kind not in floats and tensor.kind not in gguf.quants._type_traits:
        raise ValueError(f"{path}: tensor {tensor.name} has type {tensor.kind.name}, which cannot be dequantised")


def _half_split_order(num_rows: int, num_heads: int) -> NDArray[np.int64]:
    """llama.cpp turns neighbouring rows of a head together, the checkpoints row i of each half: evens, then odds."""
    rows = np.arange(num_rows, dtype=np.int64).reshape(num_heads, num_rows // num_heads // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


def _checkpoint_dtype(tensors: list[PlannedTensor]) -> str:
    """The type of the matrices, where they agree."""
    kinds = {t.dtype for t in tensors if len(t.source.shape) > 1}
    return DTYPE_NAMES[kinds.pop()] if len(kinds) == 1 else "float32"


def write_safetensors(path: Path, file: GgufFile, tensors: list[PlannedTensor]) -> None:
    """Layout: 8 bytes of header length, a JSON header padded with spaces to 8 bytes, then the tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.num_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.source.shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors:
            for chunk in _dequantised(file, tensor):
                out.write(chunk.data)


def _dequantised(file: GgufFile, tensor: PlannedTensor) -> Iterator[NDArray[Any]]:
    source = tensor.source
    order = np.arange(source.num_rows) if tensor.row_order is None else tensor.row_order
    step = max(1, CHUNK_ELEMENTS // source.shape[-1])
    if tensor.row_order is not None and len(source.shape) == 1:
        values = file.rows(source, np.array([0]))[0, order]
        yield _as_stored(values, tensor)
        return
    for start in range(0, source.num_rows, step):
        yield _as_stored(file.rows(source, order[start : start + step]), tensor)


def _as_stored(values: NDArray[np.float32], tensor: PlannedTensor) -> NDArray[Any]:
    """The bytes of the chosen type. A bfloat16 is the upper half of a float32, and these lost nothing on the way."""
    if tensor.offset:
        values = values + np.float32(tensor.offset)
    values = np.ascontiguousarray(values, dtype=np.float32)
    if tensor.dtype == "F16":
        return values.astype(np.float16)
    if tensor.dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values


def _write_json(path: Path, value: Mapping[str, Any], indent: int | None = None) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=indent), encoding="utf-8")
