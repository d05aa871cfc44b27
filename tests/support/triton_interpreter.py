"""Triton's interpreter, for tests: kernels run on the CPU, one program after another. Import before any kernel.

Triton reads the variable when a kernel is decorated, its own library's included, so the first import decides for the
whole process. Skips the module that imports this where Triton is not installed.
"""

from __future__ import annotations

import os
import sys

import pytest

assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1", "Triton was imported without it"
os.environ["TRITON_INTERPRET"] = "1"

interpreter = pytest.importorskip("triton.runtime.interpreter")

_patch_lang_tensor = interpreter._patch_lang_tensor


def _patch_with_numbers(tensor, scope):
    """Triton's scalars are arrays of one element, which numpy no longer turns into numbers by itself (since 2.4)."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_with_numbers
