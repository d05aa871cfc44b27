"""The GPU check's quantised products: right first, then beside the same product in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import torch
import torch.nn.functional as F

from benchmarks.gpu_scene import DEVICE, seconds_of
from configs.quantization import INT4_KERNEL_GROUPS, QuantizationSpec
from workers.quantization.fp8_block_matrix import Fp8BlockMatrix
from workers.quantization.fp8_matrix import Fp8Matrix
from workers.quantization.int4_matrix import Int4Matrix
from workers.quantization.kept import KeptPlace
from workers.quantization.placement import PROBE_TOLERANCE, Kernel, kernel_unavailable, probe, random_slice

Row = tuple[object, ...]

KINDS: dict[str, tuple[QuantizationSpec, Kernel]] = {
    "fp8, scales per row": (QuantizationSpec(format="fp8"), Fp8Matrix),
    "fp8, blocks of 128 x 128": (QuantizationSpec(format="fp8", block=(128, 128)), Fp8BlockMatrix),
    **{
        f"int4, groups of {group}": (QuantizationSpec(format="gptq", group_size=group), Int4Matrix)
        for group in INT4_KERNEL_GROUPS
    },
}
MATRICES = ((6144, 4096), (28672, 4096), (4096, 14336))  # of Llama-3.1-8B
BLOCK_MATRICES = ((1536, 4096), (592, 400))
BLOCK_TOLERANCE = 5e-3
"""bfloat16 rounds to 2e-3 at the mean; the matrix units add fp8 products in fewer bits than float32 has."""
TOKENS = (1, 16, 64, 512)


def check_quantized() -> Iterator[Row]:
    """What each kernel makes of a small product, against plain PyTorch."""
    for what, (spec, kernel) in KINDS.items():
        try:
            error = probe(spec, kernel, DEVICE)
            yield what, f"{error:.1e}", "ok" if error < PROBE_TOLERANCE else "WRONG"
        except Exception:  # a library's or the compiler's
            yield what, kernel_unavailable(spec, kernel, DEVICE), "not on this card: dequantised at load"
    yield from check_blocks()


@torch.inference_mode()
def check_blocks() -> Iterator[Row]:
    """The own product by every one of its tiles, and with a last group that is cut."""
    spec, kernel = KINDS["fp8, blocks of 128 x 128"]
    if kernel_unavailable(spec, kernel, DEVICE) is not None:
        return
    for num_rows, num_columns in BLOCK_MATRICES:
        weight = random_slice(spec, num_rows, num_columns)
        matrix = kernel(spec, KeptPlace(num_rows, num_columns, (), DEVICE))
        matrix.load([weight])
        on_device = replace(weight, **{f.name: getattr(weight, f.name).to(DEVICE) for f in fields(weight)})
        for num_tokens in (1, 33, 300):
            x = torch.randn(num_tokens, num_columns, dtype=torch.bfloat16, device=DEVICE)
            expected = kernel.reference(x, on_device)
            error = float((matrix(x, None).float() - expected).norm() / expected.norm())
            what = f"fp8 in blocks: {num_tokens} x {num_columns} -> {num_rows}"
            yield what, f"{error:.1e}", "ok" if error < BLOCK_TOLERANCE else "WRONG"


@torch.inference_mode()
def time_quantized() -> Iterator[Row]:
    """Microseconds of Llama-3.1-8B's products, kept quantised and in bfloat16."""
    for what in ("fp8, scales per row", "fp8, blocks of 128 x 128", "int4, groups of 128"):
        spec, kernel = KINDS[what]
        if kernel_unavailable(spec, kernel, DEVICE) is not None:
            continue
        for num_rows, num_columns in MATRICES:
            matrix = kernel(spec, KeptPlace(num_rows, num_columns, (), DEVICE))
            matrix.load([random_slice(spec, num_rows, num_columns)])
            weight = torch.randn(num_rows, num_columns, dtype=torch.bfloat16, device=DEVICE)
            for num_tokens in TOKENS:
                x = torch.randn(num_tokens, num_columns, dtype=torch.bfloat16, device=DEVICE)
                kept = seconds_of(lambda m=matrix, x=x: m(x, None))  # type: ignore[misc]
                plain = seconds_of(lambda w=weight, x=x: F.linear(x, w))  # type: ignore[misc]
                shape = f"{what}: {num_tokens} x {num_columns} -> {num_rows}"
                yield shape, f"{kept * 1e6:.1f}", f"{plain * 1e6:.1f}", f"{plain / kept:.2f}"
