"""Triton's interpreter, for tests: kernels run on the CPU, one program after another. Import before any kernel.

Triton reads the variable when a kernel is decorated, its own library's included, so the first import decides for the
whole process. Skips the module that imports this where Triton is not installed.
"""

from __future__ import annotations

import os
import sys
import threading

import numpy as np
import pytest
import torch

assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1", "Triton was imported without it"
os.environ["TRITON_INTERPRET"] = "1"

interpreter = pytest.importorskip("triton.runtime.interpreter")
tl = pytest.importorskip("triton.language")

_patch_lang_tensor = interpreter._patch_lang_tensor


def _patch_with_numbers(tensor, scope):
    """Triton's scalars are arrays of one element, which numpy no longer turns into numbers by itself (since 2.4)."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_with_numbers


FIRST_BEYOND_FP8 = 464.0
"""Half-way to what would follow its largest, 448."""

_convert_float = interpreter._convert_float
_TORCH_DTYPES = {"fp8e4nv": torch.float8_e4m3fn, "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def _convert_by_torch(values, source, target, rounding_mode):
    """To and from fp8 and bf16; its own way cuts digits off, and drops carries and small numbers.

    What fp8 cannot hold becomes NaN, as the format has it; some of torch's versions and some devices saturate.
    """
    if not {"fp8e4nv", "bf16"} & {str(source), str(target)}:
        return _convert_float(values, source, target, rounding_mode)
    bits = {8: np.uint8, 16: np.int16, 32: np.int32}
    tensor = torch.from_numpy(np.ascontiguousarray(values).view(bits[source.primitive_bitwidth]))
    numbers = tensor.view(_TORCH_DTYPES[str(source)])
    if str(target) == "fp8e4nv":
        numbers = torch.where(numbers.abs() > FIRST_BEYOND_FP8, torch.nan, numbers)
    converted = numbers.to(_TORCH_DTYPES[str(target)])
    width = target.primitive_bitwidth
    return converted.view({8: torch.uint8, 16: torch.int16, 32: torch.int32}[width]).numpy().view(f"uint{width}")


interpreter._convert_float = _convert_by_torch

_create_dot = interpreter.InterpreterBuilder.create_dot


def _dot_in_float32(self, a, b, d, *args):
    """A product of bf16, whose bits it would multiply as whole numbers, is one of float32: exact, as the device's."""
    if str(a.dtype.scalar) == "bf16":
        a, b = (
            interpreter.TensorHandle(
                _convert_by_torch(x.data, x.dtype.scalar, tl.float32, None).view(np.float32), tl.float32
            )
            for x in (a, b)
        )
    return _create_dot(self, a, b, d, *args)


interpreter.InterpreterBuilder.create_dot = _dot_in_float32

_execute = interpreter.GridExecutor.__call__
_one_at_a_time = threading.Lock()


def _execute_alone(self, *args, **kwargs):
    """While a kernel runs, names of `triton.language` are others; ranks that are threads would undo that."""
    with _one_at_a_time:
        return _execute(self, *args, **kwargs)


interpreter.GridExecutor.__call__ = _execute_alone
