"""What quantised weights will take is known before anything is loaded: where they are kept, and where dequantised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.preflight import compute_budget
from configs.matrices import num_parameters, num_rank_parameters, rank_weight_bytes, split_inner, weight_bytes
from configs.model_spec import ModelSpec
from configs.schema import EngineConfig, ModelConfig, ParallelConfig

LAYER_PARAMETERS = 4096 * (6144 + 4096 + 3 * 14336)
OTHER_PARAMETERS = 2 * 128256 * 4096 + 65 * 4096
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FP8_BYTES = LAYER_PARAMETERS + 4 * (6144 + 4096 + 2 * 14336 + 4096)
BLOCKS = FP8 | {"weight_block_size": [128, 128]}
BLOCK_BYTES = LAYER_PARAMETERS + 4 * LAYER_PARAMETERS // 128
INT4_BYTES = LAYER_PARAMETERS // 2 + 4 * LAYER_PARAMETERS // 128


@pytest.fixture
def read(tmp_path: Path):
    """Llama-3.1-8B's shape with a quantization_config."""

    def make(quantization: dict[str, Any] | None) -> ModelSpec:
        config = {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "torch_dtype": "bfloat16",
            "quantization_config": quantization,
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        return ModelSpec.from_directory(tmp_path)

    return make


@pytest.mark.parametrize(("quantization", "layer_bytes"), [(FP8, FP8_BYTES), (BLOCKS, BLOCK_BYTES), (GPTQ, INT4_BYTES)])
def test_kept_weights_take_their_bits_and_their_scales(quantization, layer_bytes, read):
    assert weight_bytes(read(quantization), "bfloat16", kept=True) == 32 * layer_bytes + 2 * OTHER_PARAMETERS


@pytest.mark.parametrize(
    "quantization",
    [None, GPTQ | {"desc_act": True}, GPTQ | {"group_size": 16}, FP8 | {"weight_block_size": [128, 96]}],
)
def test_what_no_kernel_takes_is_counted_as_dequantised(quantization, read):
    whole = 2 * (32 * LAYER_PARAMETERS + OTHER_PARAMETERS)
    assert weight_bytes(read(quantization), "bfloat16", kept=True) == whole


def test_a_module_that_the_checkpoint_leaves_alone_is_counted_in_full(read):
    spec = read(FP8 | {"modules_to_not_convert": ["lm_head", "model.layers.3.mlp.down_proj"]})
    saved = 4096 * 14336 - 4 * 4096
    assert weight_bytes(spec, "bfloat16", kept=True) == weight_bytes(read(FP8), "bfloat16", kept=True) + saved


def test_a_fused_product_is_kept_only_if_all_its_modules_are_quantised(read):
    spec = read(FP8 | {"modules_to_not_convert": ["model.layers.0.self_attn.k_proj"]})
    saved = 4096 * 6144 - 4 * 6144
    assert weight_bytes(spec, "bfloat16", kept=True) == weight_bytes(read(FP8), "bfloat16", kept=True) + saved


@pytest.mark.parametrize("quantization", [GPTQ, BLOCKS])
@pytest.mark.parametrize("num_ranks", [3, 4, 5, 16])
def test_the_mlp_is_cut_where_groups_end_so_that_every_rank_keeps_few_bits(num_ranks, quantization, read):
    spec = read(quantization)
    parts = split_inner(spec, num_ranks)
    assert all(part.start % 128 == len(part) % 128 == 0 for part in parts) and parts[-1].stop == 14336
    held = [rank_weight_bytes(spec, rank, num_ranks, "bfloat16", kept=True) for rank in range(num_ranks)]
    norms_and_kv_heads = 1.01 if num_ranks <= 8 else 1.04
    assert sum(held) < norms_and_kv_heads * weight_bytes(spec, "bfloat16", kept=True)


def test_a_cut_inside_a_group_costs_that_matrix_its_bits(read):
    small, large = (read(GPTQ | {"group_size": size}) for size in (128, 1024))
    fits, splits = (rank_weight_bytes(spec, 0, 16, "bfloat16", kept=True) for spec in (small, large))
    columns = 256 + 896  # of a sixteenth of the heads, and of the MLP's 14 groups of 1024
    assert splits - fits == pytest.approx(32 * 4096 * columns * (2 - 0.5), rel=0.05)


def test_the_budget_counts_full_precision_on_a_cpu_and_few_bits_on_a_gpu(read):
    spec = read(GPTQ)
    config = EngineConfig(model=ModelConfig(path="llama"), parallel=ParallelConfig(tensor_parallel_size=2))
    on_cpu, on_gpu = (compute_budget(config, spec, device).ranks[0].weight_bytes for device in ("cpu", "cuda"))
    assert on_cpu == rank_weight_bytes(spec, 0, 2, "float32") == 4 * num_rank_parameters(spec, 0, 2)
    assert on_gpu == rank_weight_bytes(spec, 0, 2, "bfloat16", kept=True) < on_cpu / 5


def test_random_weights_are_counted_in_full(read):
    spec = read(GPTQ)
    config = EngineConfig(model=ModelConfig(path="llama", load_format="random"))
    assert compute_budget(config, spec, "cuda").ranks[0].weight_bytes == 2 * num_parameters(spec)
