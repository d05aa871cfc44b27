"""What a KV cache can be kept in: the bytes that takes, and which device and compute path can read it.

Owns the refusals of `cache.dtype`. Knows no tensors (`workers.kv_format`) and does not know what a backend on a GPU
can do beyond what is written here (`workers.attention`).
"""

from __future__ import annotations

NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
SCALE_BYTES = 4
"""int8: a float32 behind the numbers of each head."""

PYTORCH = "pytorch"
"""The `worker.cpu_kernels` that computes without C++."""


def head_bytes(dtype: str, head_dim: int) -> int:
    """Bytes of one head's key, or value, of one token."""
    return head_dim * NUMBER_BYTES[dtype] + (SCALE_BYTES if dtype == "int8" else 0)


def refusal(dtype: str, *, device: str, model_dtype: str | None, cpu_kernels: str) -> str | None:
    """Why a cache of `dtype` cannot be had on "cpu" or "cuda", with the remedy; None if it can.

    `model_dtype` None: the checkpoint's own, which is not known yet.
    """
    if dtype == model_dtype:
        return None
    if device == "cuda":
        return _refusal_on_gpu(dtype, model_dtype)
    # The kernels leave models in float16 to PyTorch.
    alternative = {"float16": "bfloat16", "fp8": "int8"}.get(dtype)
    if alternative is not None and cpu_kernels != PYTORCH and model_dtype != "float16":
        return (
            f"cache.dtype {dtype} is not served by the C++ kernels; give {alternative}, which takes about the same "
            f"memory, or worker.cpu_kernels {PYTORCH}"
        )
    return None


def _refusal_on_gpu(dtype: str, model_dtype: str | None) -> str | None:
    if dtype == "int8":
        return "cache.dtype int8 is not served on a GPU; give fp8, which takes about the same memory"
    if dtype == "fp8" or model_dtype is None:
        return None
    return (
        f"cache.dtype is {dtype} and the model computes in {model_dtype}, which on a GPU must be the same; "
        f"leave cache.dtype out, or set model.dtype to {dtype}"
    )
