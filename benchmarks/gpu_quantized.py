"""The GPU check's quantised products: right first, then beside the same product in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from benchmarks.gpu_scene import DEVICE, seconds_of
from configs.quantization import INT4_KERNEL_GROUPS, QuantizationSpec
from workers.quantization.fp8_matrix import Fp8Matrix
from workers.quantization.int4_matrix import Int4Matrix
from workers.quantization.kept import KeptPlace
from workers.quantization.placement import PROBE_TOLERANCE, Kernel, kernel_unavailable, probe, random_slice

Row = tuple[object, ...]

KINDS: dict[str, tuple[QuantizationSpec, Kernel]] = {
    "fp8, scales per row": (QuantizationSpec(format="fp8"), Fp8Matrix),
    **{
        f"int4, groups of {group}": (QuantizationSpec(format="gptq", group_size=group), Int4Matrix)
        for group in INT4_KERNEL_GROUPS
    },
}
MATRICES = ((6144, 4096), (28672, 4096), (4096, 14336))  # of Llama-3.1-8B
TOKENS = (1, 16, 64, 512)


def check_quantized() -> Iterator[Row]:
    """What each kernel makes of a small product, against plain PyTorch."""
    for what, (spec, kernel) in KINDS.items():
        try:
            error = probe(spec, kernel, DEVICE)
            yield what, f"{error:.1e}", "ok" if error < PROBE_TOLERANCE else "WRONG"
        except (RuntimeError, NotImplementedError):
            yield what, kernel_unavailable(spec, kernel, DEVICE), "not on this card: dequantised at load"


@torch.inference_mode()
def time_quantized() -> Iterator[Row]:
    """Microseconds of Llama-3.1-8B's products, kept quantised and in bfloat16."""
    for what in ("fp8, scales per row", "int4, groups of 128"):
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
