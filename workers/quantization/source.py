"""The loader's view of a quantised checkpoint: it asks for weights and gets them dequantised, its slice only.

A matrix counts as quantised if the files hold what its format stores; all others are read as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from configs.quantization import Format, QuantizationSpec
from workers.layers.parameter import Piece
from workers.quantization.awq import is_awq, read_awq
from workers.quantization.fp8 import is_fp8, read_fp8
from workers.quantization.gptq import is_gptq, read_gptq
from workers.quantization.pack_quantized import is_pack_quantized, read_pack_quantized
from workers.quantization.slices import Fp8Slice, Int4Slice, MatrixPart, TensorFiles

QuantizedSlice = Fp8Slice | Int4Slice


class Reader(NamedTuple):
    holds: Callable[[TensorFiles, str], bool]
    read: Callable[[TensorFiles, QuantizationSpec, MatrixPart], QuantizedSlice]


READERS: dict[Format, Reader] = {
    "fp8": Reader(is_fp8, read_fp8),
    "float-quantized": Reader(is_fp8, read_fp8),
    "awq": Reader(is_awq, read_awq),
    "gptq": Reader(is_gptq, read_gptq),
    "pack-quantized": Reader(is_pack_quantized, read_pack_quantized),
}

UNUSED_SUFFIXES = (".input_scale", ".k_scale", ".v_scale", ".kv_scale", ".output_scale")
"""Fixed scales of activations, which are scaled by what they hold, and of KV (`workers.quantization.kv_scales`)."""


class DequantizingSource:
    """Reads from `files`; weights of quantised matrices come as float32."""

    def __init__(self, files: TensorFiles, spec: QuantizationSpec) -> None:
        self._files = files
        self._spec = spec
        self._reader = READERS[spec.format]

    def read(self, name: str, piece: Piece) -> Tensor:
        module, _, kind = name.rpartition(".")
        if kind == "weight" and piece.columns is not None and self._reader.holds(self._files, module):
            return self.read_slice(module, piece).dequantize()
        values = self._files.read(name, piece)
        if values.dtype.itemsize == 1 or not values.dtype.is_floating_point:
            raise ValueError(f"{name} has the type {values.dtype}, but the checkpoint holds no scale for it")
        return values

    def read_slice(self, module: str, piece: Piece) -> QuantizedSlice:
        """The piece of a matrix, still quantised. ValueError: the files hold it unquantised."""
        if not self._reader.holds(self._files, module):
            raise ValueError(f"{module} is not quantised, though the quantization_config says that it is")
        assert piece.columns is not None
        outputs, inputs = piece.full_shape
        part = MatrixPart(module, (outputs, inputs), piece.rows, piece.columns)
        if not piece.rows or not piece.columns:
            empty = torch.empty(len(piece.rows), len(piece.columns), dtype=torch.float8_e4m3fn)
            return Fp8Slice(empty, torch.ones(len(piece.rows), 1), torch.zeros(len(piece.columns), dtype=torch.int64))
        return self._reader.read(self._files, self._spec, part)

    def is_idle(self, name: str) -> bool:
        """Whether a tensor that no parameter asked for may be left aside."""
        if name.endswith(UNUSED_SUFFIXES):
            return True
        # Some GPTQ packers write a bias of zeros for every matrix.
        return name.endswith(".bias") and self._spec.format == "gptq" and not self._files.read_whole(name).any()
