"""Which matrices stay quantised in memory, decided once at start, and what it costs to dequantise the others.

A kernel is taken if the checkpoint's variant and the model's dtype allow it and a small product on this very device
is what plain PyTorch makes of it.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from configs.matrices import rank_weight_bytes
from configs.model_spec import ModelSpec
from configs.quantization import QuantizationSpec
from workers.kernels.available import describe, triton_unavailable_reason
from workers.layers.linear import ParallelLinear
from workers.layers.parameter import Piece, sharded
from workers.parallel import ParallelGroup
from workers.quantization.fp8_block_matrix import Fp8BlockMatrix
from workers.quantization.fp8_matrix import Fp8Matrix
from workers.quantization.int4_matrix import Int4Matrix
from workers.quantization.kept import KeptPlace, QuantizedMatrix
from workers.quantization.slices import Fp8Slice, Int4Slice

log = logging.getLogger(__name__)

Kernel = type[QuantizedMatrix]

PROBE_ROWS, PROBE_COLUMNS = 64, 256
PROBE_TOKENS = (1, 3, 33)
"""Libraries have rules of their own for one token, and for numbers of tokens that fill no tile."""
PROBE_TOLERANCE = 0.02
"""Largest error of a probe, against the largest result: bfloat16 rounds to 0.004 of it."""


def choose_kernel(spec: ModelSpec, group: ParallelGroup, dtype: torch.dtype, device: torch.device) -> Kernel | None:
    """None: the weights are not quantised, or are dequantised at load; the log says why and with how many bytes."""
    quantization = spec.quantization
    if quantization is None:
        return None
    name = str(dtype).removeprefix("torch.")
    kernel = kernel_for(quantization)
    reason = quantization.kernel_refusal(name) or kernel_unavailable(quantization, kernel, device)
    sizes = [rank_weight_bytes(spec, group.rank, group.size, name, kept=kept) / 1e6 for kept in (True, False)]
    if reason is None:
        log.info("weights: %s, kept as they are: %.1f MB instead of %.1f MB", quantization.describe(), *sizes)
        return kernel
    log.info("weights: %s, dequantised to %s at load: %.1f MB (%s)", quantization.describe(), name, sizes[1], reason)
    return None


def kernel_for(spec: QuantizationSpec) -> Kernel:
    if spec.bits == 4:
        return Int4Matrix
    return Fp8Matrix if spec.block is None else Fp8BlockMatrix


def kernel_unavailable(spec: QuantizationSpec, kernel: Kernel, device: torch.device) -> str | None:
    """Why `device` has no such kernel; None: it has, and a small product was right."""
    if device.type != "cuda":
        return f"no kernel for them on {device.type}"
    needed = (8, 0) if kernel is Int4Matrix else (8, 9)
    if torch.cuda.get_device_capability(device) < needed:
        return f"{torch.cuda.get_device_name(device)} is older than sm_{needed[0]}{needed[1]}"
    reason = triton_unavailable_reason(device) if kernel is Fp8BlockMatrix else None
    if reason is not None:
        return f"triton: {reason}"
    try:
        error = probe(spec, kernel, device)
    except Exception as refusal:  # a compiler's or a driver's: whatever it is, this kernel cannot be used
        return f"its kernel failed on this device ({describe(refusal)})"
    return None if error < PROBE_TOLERANCE else f"its kernel is wrong on this device by {error:.3f}"


@torch.inference_mode()
def probe(spec: QuantizationSpec, kernel: Kernel, device: torch.device) -> float:
    """The largest error of some small products, against the largest result."""
    generator = torch.Generator("cpu").manual_seed(0)
    weight = random_slice(spec, PROBE_ROWS, PROBE_COLUMNS)
    matrix = kernel(spec, KeptPlace(PROBE_ROWS, PROBE_COLUMNS, (), device))
    matrix.load([weight])
    errors = []
    for num_tokens in PROBE_TOKENS:
        x = torch.randn(num_tokens, PROBE_COLUMNS, generator=generator, device="cpu").to(torch.bfloat16)
        actual, expected = matrix(x.to(device), None).float().cpu(), kernel.reference(x, weight)
        errors.append((actual - expected).abs().max() / expected.abs().max())
    return float(torch.stack(errors).max())


def random_slice(spec: QuantizationSpec, num_rows: int, num_columns: int) -> Fp8Slice | Int4Slice:
    """A matrix to try a kernel with, on the CPU as a checkpoint's are."""
    cpu = torch.device("cpu")
    generator = torch.Generator(cpu).manual_seed(0)
    whole = spec.block[1] if spec.block is not None else num_columns
    group = whole if spec.bits == 8 else spec.kernel_group(num_columns) or num_columns
    num_groups = -(-num_columns // group)
    scales = torch.rand(num_rows, num_groups, generator=generator, device=cpu) + 0.5
    groups = torch.arange(num_columns, device=cpu) // group
    if spec.bits == 8:
        values = torch.randn(num_rows, num_columns, generator=generator, device=cpu).to(torch.float8_e4m3fn)
        return Fp8Slice(values, scales, groups)
    numbers = torch.randint(0, 16, (num_rows, num_columns), generator=generator, dtype=torch.uint8, device=cpu)
    zeros = torch.randint(0, 16, (num_rows, num_groups), generator=generator, device=cpu).float()
    return Int4Slice(numbers, scales, zeros, groups)


def place_matrices(
    model: nn.Module, spec: QuantizationSpec, kernel: Kernel, dtype: torch.dtype, device: torch.device
) -> None:
    """Give every linear layer that was built without memory a kept matrix, or a weight to dequantise into."""
    num_dequantized = 0
    for name, linear in model.named_modules():
        if not isinstance(linear, ParallelLinear):
            continue
        assert linear.weight is not None
        pieces, shape = linear.weight.pieces, linear.weight.shape
        sources = tuple((piece.tensor_name(f"{name}.weight").removesuffix(".weight"), piece) for piece in pieces)
        if _stays(spec, sources, shape[0]):
            linear.register_parameter("weight", None)
            linear.kept = kernel(spec, KeptPlace(shape[0], shape[1], sources, device))
        else:
            linear.weight = sharded(torch.empty(shape, dtype=dtype, device=device), pieces)
            num_dequantized += any(spec.is_quantized(module) for module, _ in sources)
    if num_dequantized:
        log.info("weights: %d matrices are dequantised all the same: their cut splits groups or tiles", num_dequantized)


def _stays(spec: QuantizationSpec, sources: tuple[tuple[str, Piece], ...], num_rows: int) -> bool:
    columns = sources[0][1].columns
    assert columns is not None
    return all(spec.is_quantized(module) for module, _ in sources) and spec.can_keep(num_rows, columns)
