"""Reading config.json in both layouts, and refusing by name what is not served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs.matrices import num_parameters, num_rank_parameters, weight_bytes
from configs.model_spec import ModelSpec
from configs.schema import CacheConfig

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def config(**changes: Any) -> dict[str, Any]:
    """A Llama as older libraries write it; a change to ... removes the key."""
    base = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    return {key: value for key, value in (base | changes).items() if value is not ...}


def read(directory: Path, generation: dict[str, Any] | None = None, **changes: Any) -> ModelSpec:
    (directory / "config.json").write_text(json.dumps(config(**changes)))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return ModelSpec.from_directory(directory)


def gemma(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 256,
        "num_hidden_layers": 12,
        "rope_theta": ...,
        **changes,
    }


def test_smollm2_has_the_size_its_authors_give(tmp_path: Path) -> None:
    spec = read(tmp_path)
    assert num_parameters(spec) == 134_515_008
    assert weight_bytes(spec, "float32") == 538_060_032
    assert spec.kv_bytes_per_token("bfloat16") == 30 * 2 * 3 * 64 * 2
    assert spec.kv_bytes_per_token("fp8") == 30 * 2 * 3 * 64
    assert spec.kv_bytes_per_token("int8") == 30 * 2 * 3 * (64 + 4)
    assert (spec.head_dim, spec.attention_scale, spec.dtype) == (64, 0.125, "bfloat16")


def test_ranks_together_hold_the_matrices_once_and_the_norms_each(tmp_path: Path) -> None:
    spec = read(tmp_path)
    norms = (2 * 30 + 1) * 576
    assert sum(num_rank_parameters(spec, rank, 2) for rank in range(2)) == num_parameters(spec) + norms


def test_both_layouts_of_rope_mean_the_same(tmp_path: Path) -> None:
    scaling = {**LLAMA3, "original_max_position_embeddings": 4096}
    old = read(tmp_path, rope_theta=5e5, rope_scaling=scaling)
    new = read(tmp_path, rope_theta=..., rope_parameters={"rope_theta": 5e5, **scaling})
    assert old == new
    assert (old.rope.theta, old.rope.kind, old.rope.original_max_len) == (5e5, "llama3", 4096)


def test_the_oldest_spelling_of_the_rope_type_is_read(tmp_path: Path) -> None:
    spec = read(tmp_path, rope_scaling={"type": "linear", "factor": 4.0})
    assert (spec.rope.kind, spec.max_model_len) == ("linear", 4 * 8192)


@pytest.mark.parametrize(
    ("scaling", "max_model_len"),
    [
        (None, 8192),
        ({"rope_type": "dynamic", "factor": 2.0}, 16384),
        ({**LLAMA3, "original_max_position_embeddings": 1024}, 8192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}, 32768),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
    ],
)
def test_the_limit_counts_the_stretch_once(scaling: dict[str, Any] | None, max_model_len: int, tmp_path: Path) -> None:
    assert read(tmp_path, rope_scaling=scaling).max_model_len == max_model_len


def test_yarn_tempers_attention_unless_told_otherwise(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    assert read(tmp_path, rope_scaling=yarn).rope.attention_factor == pytest.approx(1.1386294)
    assert read(tmp_path, rope_scaling={**yarn, "attention_factor": 1.0}).rope.attention_factor == 1.0
    assert read(tmp_path, rope_scaling={**yarn, "mscale": 1.0, "mscale_all_dim": 1.0}).rope.attention_factor == 1.0


def test_dynamic_rope_shares_prefixes_only_within_its_original_length(tmp_path: Path) -> None:
    spec = read(tmp_path, rope_scaling={"type": "dynamic", "factor": 2.0})
    assert spec.can_share_prefixes(8192)
    assert not spec.can_share_prefixes(8193)
    assert read(tmp_path).can_share_prefixes(10**6)


def test_a_model_that_cannot_share_prefixes_has_no_prefix_cache(tmp_path: Path) -> None:
    dynamic = read(tmp_path, rope_scaling={"type": "dynamic", "factor": 2.0})
    on, off = CacheConfig(block_size=32), CacheConfig(block_size=32, enable_prefix_caching=False)
    assert dynamic.cache_config(on, 8192) == on
    assert dynamic.cache_config(on, 8193) == off
    assert read(tmp_path).cache_config(off, 8192) == off


def test_mistral_has_its_window_on_every_layer(tmp_path: Path) -> None:
    assert read(tmp_path, architectures=["MistralForCausalLM"], sliding_window=512).windows == (512,) * 30
    assert read(tmp_path, architectures=["MistralForCausalLM"], sliding_window=None).windows == (None,) * 30


def test_qwen2_uses_its_window_only_where_told(tmp_path: Path) -> None:
    qwen2 = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 512, "max_window_layers": 28}
    off = read(tmp_path, **qwen2, use_sliding_window=False)
    assert off.windows == (None,) * 30
    assert off.attention_bias and not off.attention_output_bias
    assert read(tmp_path, **qwen2, use_sliding_window=True).windows == (None,) * 28 + (512,) * 2


def test_qwen3_norms_its_heads(tmp_path: Path) -> None:
    spec = read(tmp_path, architectures=["Qwen3ForCausalLM"], head_dim=128)
    assert spec.qk_norm and spec.head_dim == 128 and not spec.attention_bias


def test_gemma3_alternates_windows_and_ropes(tmp_path: Path) -> None:
    spec = read(tmp_path, **gemma(sliding_window=512, query_pre_attn_scalar=64))
    assert spec.windows == ((512,) * 5 + (None,)) * 2
    assert spec.local_rope is not None
    assert (spec.rope.theta, spec.local_rope.theta) == (1e6, 1e4)
    assert (spec.attention_scale, spec.embedding_scale, spec.activation) == (0.125, 24.0, "gelu_tanh")
    assert spec.norm_plus_one and spec.post_norms and spec.qk_norm


def test_gemma3_reads_ropes_per_layer_type_and_does_not_stretch_twice(tmp_path: Path) -> None:
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    new = read(tmp_path, **gemma(rope_parameters=ropes))
    old = read(tmp_path, **gemma(rope_scaling={"rope_type": "linear", "factor": 8.0}, rope_local_base_freq=2e4))
    assert new == old
    assert new.local_rope is not None
    assert (new.rope.kind, new.local_rope.kind, new.max_model_len) == ("linear", "default", 8192)


def test_generation_config_decides_the_end_of_a_text(tmp_path: Path) -> None:
    assert read(tmp_path).eos_token_ids == (2,)
    assert read(tmp_path, eos_token_id=None).eos_token_ids == ()
    assert read(tmp_path, generation={"eos_token_id": [7, 9]}).eos_token_ids == (7, 9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MixtralForCausalLM"]},
            "architecture MixtralForCausalLM is not supported; supported: Llama",
        ),
        ({"architectures": ..., "model_type": "gpt2"}, "architecture gpt2 is not supported"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope type 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope type 'linear' needs a `factor`"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"hidden_act": "relu2"}, "activation 'relu2' is not supported"),
        ({"quantization_config": {"quant_method": "eetq"}}, "eetq quantised weights are not supported"),
        ({"num_experts": 8}, "mixtures of experts"),
        ({"num_key_value_heads": 4}, "9 attention heads do not form equal groups over 4"),
        ({"torch_dtype": "float64"}, "weights of type float64 are not supported"),
        ({"hidden_size": ...}, "lacks the key 'hidden_size'; fetch the file again, or add it"),
        ({"hidden_size": "wide"}, r"config\.json: .*'wide'"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; a model has at least 1"),
        ({"vocab_size": -5}, "vocab_size is -5"),
        ({"num_hidden_layers": None}, "holds a value of the wrong kind"),
        ({"architectures": [["x"]]}, "not supported"),
        ({"rope_scaling": 5}, "holds a value of the wrong kind"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "per layer type are not supported"),
        (gemma(use_bidirectional_attention=True), "use_bidirectional_attention is not supported"),
        (gemma(layer_types=["chunked_attention"] * 12), "layer type 'chunked_attention' is not supported"),
    ],
)
def test_what_is_not_served_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, **changes)


def test_a_directory_without_config_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json; give a Hugging Face model directory"):
        ModelSpec.from_directory(tmp_path)


def test_a_broken_config_is_refused_with_its_place(tmp_path: Path) -> None:
    for content in ("{", "", "\x00", "[" * 100_000):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=r"config\.json cannot be read"):
            ModelSpec.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"config\.json is not a JSON object"):
        ModelSpec.from_directory(tmp_path)
