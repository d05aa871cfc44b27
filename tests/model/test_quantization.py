"""Quantised checkpoints give the logits of their dequantised weights, on any number of ranks; others are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from configs.model_spec import ModelSpec
from configs.quantization import QuantizationSpec
from scheduler.sampling_params import SamplingParams
from tests.support.dense_attention import DenseAttention
from tests.support.parity import Ranks, Setting, greedy_reference, make_prompts
from tests.support.quantized_runs import LAYER, Checkpoints, load, logits, logits_of
from tests.support.thread_group import run_ranks
from tests.support.tiny_quantized import (
    SCHEMES,
    pack_compressed,
    pack_fp8,
    save_tiny_quantized,
)
from workers.layers.parameter import Piece
from workers.models import build_model
from workers.parallel import SingleProcessGroup
from workers.quantization.slices import MatrixPart
from workers.quantization.source import READERS
from workers.weights import SafetensorsSource, load_weights

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("quantised"))


@pytest.mark.parametrize("name", SCHEMES)
def test_logits_equal_those_of_the_dequantised_weights_for_any_number_of_ranks(
    name: str, checkpoint: Checkpoints
) -> None:
    directory, expected = checkpoint(name)
    assert expected.std() > 0.3, "a reference that hardly varies proves nothing"
    results = [logits(directory, SingleProcessGroup())]
    for num_ranks in (2, 3):
        results += run_ranks(num_ranks, lambda group: logits(directory, group))
    for result in results:
        assert (result - expected).abs().max() < 1e-4


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_engine_continues_prompts_as_transformers_does(num_ranks: int, tmp_path: Path) -> None:
    reference = save_tiny_quantized("gptq-scattered", tmp_path)
    prompts = make_prompts([5, 33], reference.config.vocab_size)
    ranks = Ranks(tmp_path, num_ranks)
    try:
        completions = ranks.engine(Setting()).generate(
            prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        )
    finally:
        ranks.close()
    expected = [greedy_reference(reference, prompt, 8) for prompt in prompts]
    assert [list(completion.token_ids) for completion in completions] == expected


def test_blocks_of_fp8_are_dequantised_as_transformers_does_it() -> None:
    tensors, weight = pack_fp8(torch.randn(64, 96), (16, 32), "weight_scale_inv")
    whole = Fp8Dequantize(None).convert(tensors, full_layer_name="weight")["weight"]
    assert torch.equal(whole, weight)


class CountingFiles(SafetensorsSource):
    """Counts the numbers that were read of each tensor."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.num_read: dict[str, int] = {}

    def read(self, name: str, piece: Piece) -> Tensor:
        part = super().read(name, piece)
        self.num_read[name] = self.num_read.get(name, 0) + part.numel()
        return part


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("awq", ("qweight",)),
        ("gptq", ("qweight",)),
        ("ct-int4", ("weight_packed",)),
        ("ct-channel", ("weight", "weight_scale")),
    ],
)
def test_ranks_read_their_own_rows_of_packed_tensors_and_no_others(
    name: str, tensors: tuple[str, ...], checkpoint: Checkpoints
) -> None:
    directory, _ = checkpoint(name)
    spec = ModelSpec.from_directory(directory).quantization
    assert spec is not None
    module = "model.layers.0.mlp.up_proj"  # [96, 64]
    with CountingFiles(directory) as files:
        for start in range(0, 96, 32):
            part = MatrixPart(module, (96, 64), range(start, start + 32), range(64))
            READERS[spec.format].read(files, spec, part)
        for kind in tensors:
            shape = files.shape(f"{module}.{kind}")
            assert files.num_read[f"{module}.{kind}"] == shape[0] * shape[1]


def test_a_cut_in_the_middle_of_a_group_or_word_gives_the_same_weights(
    checkpoint: Checkpoints,
) -> None:
    for name in ("awq", "gptq-scattered", "ct-int4-zeros-head", "fp8-blocks"):
        directory, _ = checkpoint(name)
        spec = ModelSpec.from_directory(directory).quantization
        assert spec is not None
        with SafetensorsSource(directory) as files:
            read, shape = READERS[spec.format].read, (64, 96)
            whole = read(files, spec, MatrixPart(LAYER, shape, range(64), range(96))).dequantize()
            part = read(files, spec, MatrixPart(LAYER, shape, range(5, 43), range(13, 78))).dequantize()
        assert torch.equal(part, whole[5:43, 13:78])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "bitsandbytes"}, "bitsandbytes quantised weights are not supported; use the unquantised"),
    ({"quant_method": "awq", "bits": 8}, "awq with bits 8 is not supported"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq with version 'gemv' is not supported, only 'gemm'"),
    ({"quant_method": "awq", "bits": 4, "zero_point": False}, "awq with zero_point False"),
    ({"quant_method": "gptq", "bits": 3}, "gptq with bits 3 is not supported"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "gptq with checkpoint_format 'marlin'"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*": {}}}, "gptq with dynamic is not supported"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 with fmt 'e5m2' is not supported"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, r"fp8 with blocks of \[128\]"),
    ({"format": "nvfp4-pack-quantized"}, "compressed-tensors format 'nvfp4-pack-quantized' is not supported"),
    ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity format 'sparse-24-bitmask' is not supported"),
    ({"transform_config": {"config_groups": {}}}, "transform_config is not supported"),
    ({"weights": {"num_bits": 8}}, "pack-quantized with num_bits 8 is not supported"),
    ({"input_activations": {"num_bits": 8, "type": "int"}}, "with quantised activations is not supported"),
    ({"format": "naive-quantized"}, "naive-quantized with num_bits 4 is not supported"),
    ({"config_groups": {}}, "compressed-tensors without config_groups"),
]


def refused_config(changes: dict[str, Any]) -> dict[str, Any]:
    """`changes` itself, or those to a compressed-tensors configuration."""
    if "quant_method" in changes:
        return changes
    config = json.loads(json.dumps(SCHEMES["ct-int4"].config))
    group = config["config_groups"]["group_0"]
    group["weights"] |= changes.pop("weights", {})
    group["input_activations"] = changes.pop("input_activations", None)
    return config | changes


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_variants_that_are_not_served_are_refused_by_name(
    changes: dict[str, Any], message: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    config = json.loads((checkpoint("gptq")[0] / "config.json").read_text())
    config["quantization_config"] = refused_config(dict(changes))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        ModelSpec.from_directory(tmp_path)


def damaged(directory: Path, target: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    (target / "config.json").write_bytes((directory / "config.json").read_bytes())
    return target


@pytest.mark.parametrize(
    ("name", "kind", "change", "message"),
    [
        ("awq", "qweight", lambda t: t[:-8], r"qweight has shape \[88, 8\], its config.json calls for \[96, 8\]"),
        ("awq", "scales", lambda t: t[:-1], r"scales has shape \[2, 64\], its config.json calls for \[3, 64\]"),
        ("awq", "qzeros", lambda t: t.float(), "qzeros has the type torch.float32, the format calls for torch.int32"),
        ("gptq", "qzeros", lambda t: t[:, :-1], r"qzeros has shape \[3, 7\]"),
        ("gptq", "g_idx", lambda t: t.flip(0), "g_idx scatters groups, though"),
        ("gptq-scattered", "g_idx", lambda t: t + 1, "g_idx names groups outside 0 to 2"),
        ("gptq-scattered", "g_idx", None, "g_idx is missing, though"),
        ("gptq", "bias", lambda t: torch.ones(64), f"1 tensors that this model does not use: {LAYER}.bias"),
        ("ct-int4", "weight_shape", lambda t: t.flip(0), r"weight_shape is not \[64, 96\]"),
        ("ct-int4", "weight_packed", lambda t: t[:, :-1], r"weight_packed has shape \[64, 11\]"),
        ("ct-channel", "weight_scale", lambda t: t[:-1], r"weight_scale has shape \[63, 1\]"),
        ("ct-channel", "weight_scale", lambda t: t.to(torch.float8_e4m3fn), "which is not supported for scales"),
        ("ct-channel", "weight_scale", None, "has the type torch.float8_e4m3fn, but the checkpoint holds no scale"),
        ("fp8-blocks", "weight_scale_inv", lambda t: t[:, :-1], r"weight_scale_inv has shape \[2, 3\]"),
        ("fp8-tensor", "weight", lambda t: t.float(), "has the type torch.float32, the format calls for torch.float8"),
    ],
)
def test_damaged_tensors_are_refused_by_name(
    name: str,
    kind: str,
    change: Callable[[Tensor], Tensor] | None,
    message: str,
    checkpoint: Checkpoints,
    tmp_path: Path,
) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        stored = tensors.pop(f"{LAYER}.{kind}", torch.empty(0))
        if change is not None:
            tensors[f"{LAYER}.{kind}"] = change(stored)

    with pytest.raises(ValueError, match=message):
        load(damaged(checkpoint(name)[0], tmp_path, damage), SingleProcessGroup())


def test_random_weights_are_drawn_as_if_the_checkpoint_were_not_quantised(
    checkpoint: Checkpoints,
) -> None:
    spec = ModelSpec.from_directory(checkpoint("awq")[0])
    group = SingleProcessGroup()
    model = build_model(spec.unquantized(), group, DenseAttention(), torch.float32, "cpu")
    load_weights(model, spec.unquantized(), load_format="random")
    assert logits_of(model, replace(spec), group).isfinite().all()


def test_a_word_that_is_not_full_is_read_to_its_last_number(tmp_path: Path) -> None:
    tensors, weight = pack_compressed(torch.randn(12, 20), symmetric=False, group=10)
    assert tensors["weight_packed"].shape == (12, 3) and tensors["weight_zero_point"].shape == (2, 2)
    save_file({f"m.{kind}": tensor for kind, tensor in tensors.items()}, tmp_path / "model.safetensors")
    spec = QuantizationSpec(format="pack-quantized", group_size=10, symmetric=False)
    with SafetensorsSource(tmp_path) as files:
        whole = READERS[spec.format].read(files, spec, MatrixPart("m", (12, 20), range(12), range(20))).dequantize()
    assert torch.equal(whole, weight)
