"""Matrices that stay quantised in memory compute what their plain references do, and take the bytes foretold."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import tests.support.triton_interpreter  # noqa: F401  before any kernel
from configs.matrices import num_parameters, rank_weight_bytes, weight_bytes
from configs.model_spec import ModelSpec
from configs.quantization import QuantizationSpec
from tests.support.quantized_runs import LAYER, Checkpoints, load, logits
from tests.support.thread_group import run_ranks
from tests.support.tiny_quantized import IGNORED
from workers.layers.linear import ParallelLinear
from workers.parallel import ParallelGroup, SingleProcessGroup
from workers.quantization.fp8_block_matrix import Fp8BlockMatrix
from workers.quantization.fp8_matrix import Fp8Matrix
from workers.quantization.int4_matrix import Int4Matrix
from workers.quantization.kept import KeptPlace
from workers.quantization.placement import PROBE_TOLERANCE, Kernel, choose_kernel, kernel_for, kernel_unavailable, probe
from workers.quantization.slices import MatrixPart
from workers.quantization.source import READERS
from workers.weights import SafetensorsSource

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("quantised"))


KEPT = [
    ("ct-channel", Fp8Matrix, 0.2),
    ("fp8-tensor", Fp8Matrix, 0.2),
    ("ct-blocks", Fp8BlockMatrix, 0.2),
    ("ct-int4", Int4Matrix, 0.04),
    ("awq", Int4Matrix, 0.04),
    ("gptq-one-group", Int4Matrix, 0.04),
]
"""What may stay quantised in memory, and how far bfloat16 (and activations in 8 bits) may move logits, in stds."""


def plain(kernel: Kernel) -> Kernel:
    """The same matrix, computed by its slow reference."""

    class Plain(kernel):  # type: ignore[misc, valid-type]
        def load(self, parts: Sequence[Any]) -> None:
            self.parts = parts

        def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
            out = torch.cat([kernel.reference(x, part) for part in self.parts], dim=1).to(x.dtype)
            return out if bias is None else out + bias

    return Plain


def distance(actual: Tensor, expected: Tensor) -> float:
    """Root mean square, in standard deviations of what is expected."""
    return float((actual - expected).square().mean().sqrt() / expected.std())


@pytest.mark.parametrize(("name", "kernel", "tolerance"), KEPT)
def test_matrices_kept_quantised_give_the_logits_of_the_dequantised_ones(
    name: str, kernel: Kernel, tolerance: float, checkpoint: Checkpoints
) -> None:
    directory, expected = checkpoint(name)
    slow = logits(directory, SingleProcessGroup(), torch.bfloat16, plain(kernel))
    results = [logits(directory, SingleProcessGroup(), torch.bfloat16, kernel)]
    assert distance(results[0], slow) < 0.03
    for num_ranks in (2, 3):
        results += run_ranks(num_ranks, lambda group: logits(directory, group, torch.bfloat16, kernel))
    for result in results:
        assert distance(result, expected) < tolerance


@pytest.mark.parametrize(("name", "kernel", "tolerance"), KEPT)
def test_the_spec_knows_the_bytes_of_every_rank_whatever_is_kept(
    name: str, kernel: Kernel, tolerance: float, checkpoint: Checkpoints
) -> None:
    directory, _ = checkpoint(name)
    spec = ModelSpec.from_directory(directory)

    def held(group: ParallelGroup) -> int:
        model = load(directory, group, torch.bfloat16, kernel)
        kept = [m.kept for m in model.modules() if isinstance(m, ParallelLinear) and m.kept is not None]
        assert kept, "nothing was kept"
        tensors = [tensor for matrix in kept for tensor in vars(matrix).values() if isinstance(tensor, Tensor)]
        return sum(tensor.nbytes for tensor in [*model.parameters(), *tensors])

    for num_ranks in (1, 2, 3):
        expected = [rank_weight_bytes(spec, rank, num_ranks, "bfloat16", kept=True) for rank in range(num_ranks)]
        assert run_ranks(num_ranks, held) == expected
    assert weight_bytes(spec, "bfloat16", kept=True) < weight_bytes(spec, "bfloat16") == 2 * num_parameters(spec)
    assert weight_bytes(spec, "float32", kept=True) == weight_bytes(spec, "float32") == 4 * num_parameters(spec)


def test_a_matrix_whose_cut_splits_a_group_and_one_that_is_ignored_are_dequantised(
    checkpoint: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    directory, _ = checkpoint("awq")

    def kept(group: ParallelGroup) -> set[str]:
        model = load(directory, group, torch.bfloat16, Int4Matrix)
        return {n for n, m in model.named_modules() if isinstance(m, ParallelLinear) and m.kept is not None}

    everything = kept(SingleProcessGroup())
    assert LAYER in everything and IGNORED not in everything
    with caplog.at_level(logging.INFO, logger="workers.quantization.placement"):
        of_first, _, of_last = run_ranks(3, kept)
    heads = "model.layers.0.self_attn.o_proj"
    assert heads not in of_first and heads in of_last  # 16 and 32 of 64 columns, in groups of 32
    assert LAYER in of_first  # the MLP is cut where groups end
    assert "matrices are dequantised all the same: their cut splits groups" in caplog.text


@pytest.mark.parametrize(
    ("spec", "kernel"),
    [
        (QuantizationSpec(format="fp8"), Fp8Matrix),
        (QuantizationSpec(format="fp8", block=(128, 128)), Fp8BlockMatrix),
        (QuantizationSpec(format="gptq", group_size=64), Int4Matrix),
    ],
)
def test_each_variant_has_a_kernel_that_computes_what_its_plain_reference_does(
    spec: QuantizationSpec, kernel: Kernel
) -> None:
    assert kernel_for(spec) is kernel
    assert probe(spec, kernel, torch.device("cpu")) < PROBE_TOLERANCE


@pytest.mark.parametrize("kernel", [Fp8Matrix, Int4Matrix])
def test_a_kept_matrix_adds_its_bias_and_takes_its_rows_from_several_modules(
    kernel: Kernel, checkpoint: Checkpoints
) -> None:
    directory, _ = checkpoint("ct-channel" if kernel is Fp8Matrix else "ct-int4-zeros-head")
    spec = ModelSpec.from_directory(directory).quantization
    assert spec is not None
    modules = [f"model.layers.0.mlp.{name}" for name in ("gate_proj", "up_proj")]
    with SafetensorsSource(directory) as files:
        parts = [READERS[spec.format].read(files, spec, MatrixPart(m, (96, 64), range(96), range(64))) for m in modules]
    matrix = kernel(spec, KeptPlace(192, 64, (), torch.device("cpu")))
    matrix.load(parts)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    bias = torch.linspace(-1, 1, 192).bfloat16()
    expected = torch.cat([kernel.reference(x, part) for part in parts], dim=1) + bias.float()
    assert (matrix(x, bias).float() - expected).abs().max() < 0.01 * expected.abs().max()


@pytest.mark.parametrize(
    ("changes", "dtype", "reason"),
    [
        ({"format": "awq"}, "float16", "compute in bfloat16, not float16; model.dtype decides"),
        ({"format": "fp8", "block": (128, 128)}, "bfloat16", None),
        ({"format": "fp8", "block": (128, 48)}, "bfloat16", "no kernel for blocks of 48 columns"),
        ({"format": "float-quantized", "quantized_activations": False}, "bfloat16", "activations that are not"),
        ({"format": "gptq", "act_order": True}, "bfloat16", "scattered"),
        ({"format": "awq", "group_size": 16}, "bfloat16", "no kernel for groups of 16"),
        ({"format": "gptq", "group_size": 128}, "bfloat16", None),
    ],
)
def test_a_variant_that_no_kernel_takes_says_so(changes: dict[str, Any], dtype: str, reason: str | None) -> None:
    refusal = QuantizationSpec(**changes).kernel_refusal(dtype)
    assert refusal is None if reason is None else reason in (refusal or "")


def test_the_log_says_that_weights_are_dequantised_why_and_with_how_many_bytes(
    checkpoint: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    spec = ModelSpec.from_directory(checkpoint("gptq")[0])
    with caplog.at_level(logging.INFO, logger="workers.quantization.placement"):
        assert choose_kernel(spec, SingleProcessGroup(), torch.bfloat16, torch.device("cpu")) is None
    megabytes = f"{2 * num_parameters(spec) / 1e6:.1f} MB"
    expected = f"gptq, 4 bits, groups of 32, dequantised to bfloat16 at load: {megabytes} (no kernel for them on cpu)"
    assert expected in caplog.text
    assert spec.quantization is not None
    assert kernel_unavailable(spec.quantization, Int4Matrix, torch.device("cpu")) == "no kernel for them on cpu"
