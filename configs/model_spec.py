"""The shape of a model, read from a Hugging Face directory's config.json.

Owns which architectures and features are served; anything else is refused by name, before a byte of weights is
read. Knows no tensors and imports nothing beyond the standard library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs.cache_dtype import head_bytes
from configs.quantization import QuantizationSpec, read_quantization
from configs.rope_spec import RopeSpec, read_layered_rope, read_rope
from configs.schema import CacheConfig

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
DEFAULT_HEAD_DIM = {"Qwen3ForCausalLM": 128, "Gemma3ForCausalLM": 256}
SIZES = (
    "num_attention_heads",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_hidden_layers",
    "max_position_embeddings",
)
NO_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One dense decoder. Sizes are of the whole model; `configs.matrices` says what of it a rank holds."""

    directory: Path
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int  # tokens per sequence the checkpoint was made for, rope scaling included
    rms_norm_eps: float
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str  # the checkpoint's: float32, bfloat16 or float16
    activation: str  # silu or gelu_tanh
    attention_bias: bool  # on q, k, v
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeSpec
    local_rope: RopeSpec | None  # of layers with a window, where these differ
    windows: tuple[int | None, ...]  # per layer: a token sees itself and the window - 1 tokens before it
    attention_scale: float  # queries are multiplied by it
    attention_soft_cap: float | None
    logit_soft_cap: float | None
    embedding_scale: float | None
    norm_plus_one: bool  # gemma: the norm multiplies by 1 + weight
    post_norms: bool  # gemma: attention and MLP outputs are normed before the residual is added
    quantization: QuantizationSpec | None = None  # of the checkpoint's weights

    @classmethod
    def from_directory(cls, path: Path) -> ModelSpec:
        """ValueError: no config.json, or an architecture or feature that is not served, by name."""
        path = Path(path)
        config = _read_json(path / "config.json")
        if config is None:
            raise ValueError(
                f"{path} has no config.json; give a Hugging Face model directory, a hub id or a .gguf file"
            )
        generation = _read_json(path / "generation_config.json") or {}
        try:
            return cls(directory=path, **_read_fields(config, generation))
        except KeyError as error:
            raise ValueError(f"{path / 'config.json'} lacks the key {error}; fetch the file again, or add it") from None
        except ValueError as error:
            raise ValueError(f"{path / 'config.json'}: {error}") from None
        except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
            raise ValueError(
                f"{path / 'config.json'} holds a value of the wrong kind ({error}); fetch the file again"
            ) from error

    def unquantized(self) -> ModelSpec:
        """The same model with weights in full precision, as random ones are drawn."""
        return replace(self, quantization=None)

    def can_share_prefixes(self, max_model_len: int) -> bool:
        """Whether equal prefixes have equal KV: dynamic rope turns a long prompt by angles that follow its length."""
        return self.rope.kind != "dynamic" or max_model_len <= self.rope.original_max_len

    def cache_config(self, wanted: CacheConfig, max_model_len: int) -> CacheConfig:
        """`wanted`, but without prefix caching where this model cannot share prefixes."""
        shares = wanted.enable_prefix_caching and self.can_share_prefixes(max_model_len)
        return replace(wanted, enable_prefix_caching=shares)

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Of the whole model on one rank, in a cache of `dtype`; a rank's part follows its KV heads."""
        return 2 * self.num_layers * self.num_kv_heads * head_bytes(dtype, self.head_dim)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}; fetch the file again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object; fetch the file again")
    return content


def _read_fields(config: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    architecture = _architecture(config)
    gemma = architecture == "Gemma3ForCausalLM"
    _refuse_features(config, gemma)
    _check_sizes(config)
    num_heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or DEFAULT_HEAD_DIM.get(architecture) or config["hidden_size"] // num_heads)
    if gemma:
        rope, local_rope = read_layered_rope(config, default_theta=1e6, default_local_theta=1e4)
    else:
        rope, local_rope = read_rope(config, default_theta=1e4), None
    max_position = int(config["max_position_embeddings"])
    bias = bool(config.get("attention_bias", False)) and architecture not in ("MistralForCausalLM", "Qwen2ForCausalLM")
    return {
        "architecture": architecture,
        "vocab_size": int(config["vocab_size"]),
        "hidden_size": int(config["hidden_size"]),
        "intermediate_size": int(config["intermediate_size"]),
        "num_layers": int(config["num_hidden_layers"]),
        "num_heads": num_heads,
        "num_kv_heads": _num_kv_heads(config, num_heads),
        "head_dim": head_dim,
        # Gemma writes the stretched length into max_position_embeddings; the others write the original one.
        "max_model_len": max_position if gemma else max(max_position, rope.max_len),
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", gemma)),
        "eos_token_ids": _token_ids(generation.get("eos_token_id", config.get("eos_token_id"))),
        "bos_token_id": next(iter(_token_ids(config.get("bos_token_id"))), None),
        "dtype": _dtype(config),
        "activation": _activation(config, gemma),
        "attention_bias": architecture == "Qwen2ForCausalLM" or bias,
        "attention_output_bias": bias,
        "mlp_bias": architecture == "LlamaForCausalLM" and bool(config.get("mlp_bias", False)),
        "qk_norm": architecture in ("Qwen3ForCausalLM", "Gemma3ForCausalLM"),
        "rope": rope,
        "local_rope": local_rope,
        "windows": _windows(config, architecture),
        "attention_scale": (config.get("query_pre_attn_scalar", 256) if gemma else head_dim) ** -0.5,
        "attention_soft_cap": config.get("attn_logit_softcapping") if gemma else None,
        "logit_soft_cap": config.get("final_logit_softcapping") if gemma else None,
        "embedding_scale": config["hidden_size"] ** 0.5 if gemma else None,
        "norm_plus_one": gemma,
        "post_norms": gemma,
        "quantization": read_quantization(config),
    }


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures") or [MODEL_TYPES.get(config.get("model_type", ""), config.get("model_type"))]
    if named[0] not in MODEL_TYPES.values():
        raise ValueError(f"architecture {named[0]} is not supported; supported: {', '.join(MODEL_TYPES.values())}")
    return str(named[0])


def _refuse_features(config: Mapping[str, Any], gemma: bool) -> None:
    if gemma and config.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention is not supported: only causal models generate")
    if experts := [key for key in NO_EXPERTS if config.get(key)]:
        raise ValueError(f"mixtures of experts ({experts[0]}) are not supported")


def _check_sizes(config: Mapping[str, Any]) -> None:
    for name in SIZES:
        if int(config[name]) < 1:
            raise ValueError(f"{name} is {config[name]}; a model has at least 1")


def _num_kv_heads(config: Mapping[str, Any], num_heads: int) -> int:
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} attention heads do not form equal groups over {num_kv_heads} key-value heads")
    return num_kv_heads


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _dtype(config: Mapping[str, Any]) -> str:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"weights of type {dtype} are not supported; supported: {', '.join(DTYPE_BYTES)}")
    return dtype


def _activation(config: Mapping[str, Any], gemma: bool) -> str:
    name = config.get("hidden_activation" if gemma else "hidden_act") or ("gelu_pytorch_tanh" if gemma else "silu")
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _windows(config: Mapping[str, Any], architecture: str) -> tuple[int | None, ...]:
    """Per layer. Absent keys mean what they mean to the checkpoints' own library."""
    num_layers, window = int(config["num_hidden_layers"]), config.get("sliding_window", 4096)
    if architecture == "MistralForCausalLM":
        return (window,) * num_layers
    if architecture == "LlamaForCausalLM" or (
        architecture.startswith("Qwen") and not (config.get("use_sliding_window") and window)
    ):
        return (None,) * num_layers
    kinds = config.get("layer_types")
    if kinds is None and architecture == "Gemma3ForCausalLM":
        pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
        kinds = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]
    elif kinds is None:
        first = config.get("max_window_layers", 28)
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    if unknown := set(kinds) - {"sliding_attention", "full_attention"}:
        raise ValueError(f"layer type {min(unknown)!r} is not supported")
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for {num_layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
