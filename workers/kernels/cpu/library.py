"""The kernel library as Python sees it: its C structures and functions, and objects that own what it allocates.

Tensors are handed over by address: float32 and contiguous unless a stride is given with them. Knows no models
(`workers.packed_model`) and not how the library is made (`workers.kernels.cpu.build`).
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from ctypes import POINTER, Array, Structure, byref, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workers.kernels.cpu.build import KernelsUnavailable, build, choose_variant

log = logging.getLogger(__name__)

SPIN_MICROSECONDS = 100
"""How long a thread without work waits before it sleeps: longer than the gaps within a step, shorter than those between
two. The longer it is, the more a process that needs the same core suffers."""


class Format(IntEnum):
    """How a matrix is kept and multiplied; `Format` in matrix.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3


class KvFormat(IntEnum):
    """How keys and values are kept; `KvFormat` in kv_row.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2

    @classmethod
    def of(cls, dtype: torch.dtype) -> KvFormat:
        """Of a cache whose tensors are of `dtype`; see `workers.kv_format`."""
        return {torch.float32: cls.FLOAT32, torch.bfloat16: cls.BFLOAT16, torch.int8: cls.INT8}[dtype]


class Then(IntEnum):
    """What is done with a product; `Then` in gemm.h."""

    STORE = 0
    ADD = 1
    SILU_TIMES_UP = 2
    GELU_TIMES_UP = 3
    SOFT_CAP = 4


AllReduce = ctypes.CFUNCTYPE(c_int32, c_void_p, c_void_p, c_int64)
"""(group, address of floats, count); `AllReduce` in decoder.h."""


class CPacking(Structure):
    """`Packing` in matrix.h."""

    _fields_ = [(name, c_int32) for name in ("format", "gated", "exact", "coded")]


class CDescription(Structure):
    """`Description` in decoder.h."""

    _fields_ = [
        *[(name, c_int64) for name in ("num_layers", "hidden", "inner", "num_heads", "num_kv_heads", "head_dim")],
        *[(name, c_int64) for name in ("first_token", "num_tokens", "num_ropes", "kv_block_size")],
        *[(name, c_int32) for name in ("kv_format", "activation")],
        *[(name, c_float) for name in ("eps", "attention_scale", "attention_soft_cap", "logit_soft_cap")],
        ("embedding_scale", c_float),
        ("rope_factors", c_float * 2),
        ("rope_frequencies", c_void_p * 2),
        *[(name, c_void_p) for name in ("embedding", "head", "final_norm")],
        ("all_reduce", AllReduce),
        ("group", c_void_p),
    ]


class CLayer(Structure):
    """`Layer` in decoder.h."""

    _fields_ = [
        *[(name, c_void_p) for name in ("qkv", "output", "gate_up", "down")],
        *[(name, c_void_p) for name in ("attention_norm", "mlp_norm", "attention_out_norm", "mlp_out_norm")],
        *[(name, c_void_p) for name in ("q_norm", "k_norm", "output_bias", "down_bias", "k_cache", "v_cache")],
        *[(name, c_int64) for name in ("block_stride", "token_stride", "head_stride")],
        *[(name, c_int32) for name in ("window", "rope")],
    ]


class CStep(Structure):
    """`Step` in decoder.h."""

    _fields_ = [
        *[(name, c_int64) for name in ("num_tokens", "num_seqs", "block_table_stride")],
        *[(name, c_void_p) for name in ("token_ids", "positions", "slots")],
        *[(name, c_void_p) for name in ("first_queries", "seq_lens", "block_tables")],
        ("cosines", c_void_p * 2),
        ("sines", c_void_p * 2),
        ("hidden", c_void_p),
    ]


class CCache(Structure):
    """`Cache` in kv_row.h."""

    _fields_ = [
        *[(name, c_void_p) for name in ("k", "v")],
        *[(name, c_int64) for name in ("block_stride", "token_stride", "head_stride")],
        *[(name, c_int32) for name in ("block_size", "format")],
    ]


class CAttentionCall(Structure):
    """`AttentionCall` in attention.h."""

    _fields_ = [
        *[(name, c_int64) for name in ("num_heads", "num_kv_heads", "head_dim")],
        *[(name, c_void_p) for name in ("first_queries", "seq_lens", "block_tables")],
        *[(name, c_int64) for name in ("block_table_stride", "num_seqs")],
        ("cache", CCache),
        ("q", c_void_p),
        ("q_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        *[(name, c_float) for name in ("scale", "soft_cap")],
        ("coarse", c_int32),
    ]


class CSampleCall(Structure):
    """`SampleCall` in sampling.h."""

    _fields_ = [
        ("logits", c_void_p),
        *[(name, c_int64) for name in ("stride", "num_greedy", "num_drawn")],
        *[(name, c_void_p) for name in ("greedy", "drawn", "temperature", "seeds", "positions")],
        *[(name, c_void_p) for name in ("top_k", "top_p", "floor", "tokens")],
    ]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "instructions": (c_char_p, []),
    "pool_create": (c_void_p, [c_int32, c_int32]),
    "pool_destroy": (None, [c_void_p]),
    "group_bytes": (c_int64, [c_int32]),
    "group_create": (c_void_p, [c_int32, c_int32, c_int32, c_int64, c_int64]),
    "group_destroy": (None, [c_void_p]),
    "group_leave": (None, [c_void_p]),
    "group_is_alive": (c_int32, [c_void_p, c_int32]),
    "group_all_reduce": (c_int32, [c_void_p, c_void_p, c_int64]),
    "group_all_gather": (c_int32, [c_void_p, c_void_p, c_int64, c_void_p, c_void_p]),
    "matrix_pack": (c_void_p, [c_void_p, POINTER(CPacking), c_void_p, c_int64, c_int64, c_int64, c_void_p]),
    "matrix_release": (None, [c_void_p]),
    "matrix_bytes": (c_int64, [c_void_p]),
    "matrix_row": (None, [c_void_p, c_int64, c_void_p]),
    "decoder_create": (c_void_p, [c_void_p, POINTER(CDescription), POINTER(CLayer)]),
    "decoder_destroy": (None, [c_void_p]),
    "decoder_reserve": (c_int32, [c_void_p, c_int64]),
    "decoder_forward": (c_int32, [c_void_p, POINTER(CStep)]),
    "decoder_logits": (c_int32, [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64]),
    "sampler_create": (c_void_p, [c_void_p, c_int64]),
    "sampler_destroy": (None, [c_void_p]),
    "sampler_sample": (None, [c_void_p, POINTER(CSampleCall)]),
    "decode": (c_int32, [c_void_p, POINTER(CStep), c_void_p, c_void_p, POINTER(CSampleCall), c_void_p]),
    "linear": (c_int32, [c_void_p, c_void_p, c_void_p, c_int64, c_int32, c_float, c_void_p]),
    "rms_norm": (None, [c_void_p, c_void_p, c_int64, c_int64, c_float, c_void_p]),
    "rotate": (None, [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64]),
    "store_kv": (None, [c_void_p, POINTER(CCache), *[c_void_p] * 3, *[c_int64] * 5]),
    "attend": (c_int32, [c_void_p, POINTER(CAttentionCall), c_int32]),
    "multiply_add": (c_double, [c_void_p, c_int64]),
    "read": (None, [c_void_p, c_void_p, c_int64]),
}


_OUT_OF_MEMORY = -1  # a status; kOutOfMemory in api.cpp
_NO_MEMORY = "the CPU kernels could not allocate what they need"


class CpuKernels:
    """The functions of one loaded library, by name and without their prefix: `kernels.rms_norm(...)`."""

    def __init__(self, path: Path, variant: str) -> None:
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelsUnavailable(f"cannot load {path}: {error}") from error
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, f"antiphon_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        self.variant = variant
        self.path = path

    def __getattr__(self, name: str) -> Any:  # tells type checkers that there are more
        raise AttributeError(name)

    @property
    def description(self) -> str:
        return str(self.instructions().decode())


def load_kernels(variant: str = "auto", cache_dir: Path | None = None) -> CpuKernels:
    """Build or find the library, then load it.

    Raises:
        KernelsUnavailable: it cannot run here, or cannot be built; the message says why.
    """
    chosen = choose_variant(variant)
    kernels = CpuKernels(build(chosen, cache_dir), chosen.name)
    log.debug("CPU kernels: %s", kernels.description)
    return kernels


class Pool:
    """The threads that the kernels run on: the calling one, and helpers. One thread may call at a time."""

    def __init__(self, kernels: CpuKernels, num_threads: int, *, spin_microseconds: int = SPIN_MICROSECONDS) -> None:
        self.num_threads = num_threads
        self.handle = _owned(self, kernels.pool_create(num_threads, spin_microseconds), kernels.pool_destroy)


class PackedMatrix:
    """A weight [n, k] in the library's own order.

    `gated`: the rows are n / 2 gates, then n / 2 ups, multiplied with SILU_TIMES_UP or GELU_TIMES_UP.
    `exact`: BFLOAT16 weights are multiplied by float32 activations however many rows there are.
    `coded`: BFLOAT16 weights take 12 bits, without loss, where they and the instruction set are fit for it.
    """

    def __init__(
        self,
        kernels: CpuKernels,
        pool: Pool,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        format: Format,  # noqa: A002
        gated: bool = False,
        exact: bool = False,
        coded: bool = False,
    ) -> None:
        source = weight.detach().to(torch.float32).contiguous()
        bias = None if bias is None else bias.detach().to(torch.float32).contiguous()
        n, k = source.shape
        bias_address = None if bias is None else bias.data_ptr()
        packing = CPacking(format=format, gated=gated, exact=exact, coded=coded)
        handle = kernels.matrix_pack(pool.handle, byref(packing), source.data_ptr(), n, k, k, bias_address)
        self.handle = _owned(self, handle, kernels.matrix_release)
        self.format = format
        self.num_bytes = int(kernels.matrix_bytes(self.handle))


class SharedGroup:
    """One rank's part in the memory that the ranks of a host share; `SharedGroup` in all_reduce.h.

    Takes over `file`. Raises MemoryError: it cannot be mapped, or its lock is not to be had.
    """

    def __init__(
        self, kernels: CpuKernels, file: int, rank: int, size: int, *, timeout: float, spin_microseconds: int
    ) -> None:
        handle = kernels.group_create(file, rank, size, round(timeout * 1e9), spin_microseconds * 1000)
        self.handle = _owned(self, handle, kernels.group_destroy)


class Decoder:
    """A model's layers over one cache, with memory for steps of `num_tokens`. What they point to must outlive it."""

    def __init__(
        self, kernels: CpuKernels, pool: Pool, description: CDescription, layers: Array[CLayer], *, num_tokens: int
    ) -> None:
        handle = kernels.decoder_create(pool.handle, byref(description), layers)
        self.handle = _owned(self, handle, kernels.decoder_destroy)
        check_memory(kernels.decoder_reserve(self.handle, num_tokens))


class Sampler:
    """Memory for drawing tokens on the pool's threads; lives no longer than the pool, which the caller keeps."""

    def __init__(self, kernels: CpuKernels, pool: Pool, vocab_size: int) -> None:
        self.handle = _owned(self, kernels.sampler_create(pool.handle, vocab_size), kernels.sampler_destroy)


def _owned(owner: object, handle: int | None, destroy: Any) -> int:
    """The handle, destroyed when its owner is."""
    if not handle:
        raise MemoryError(_NO_MEMORY)
    # Not at the end of the process: a daemon thread may be in the middle of a step.
    weakref.finalize(owner, destroy, handle).atexit = False
    return handle


def check_memory(status: int) -> None:
    """Raises MemoryError: the function that returned `status` could not allocate what it needs."""
    if status == _OUT_OF_MEMORY:
        raise MemoryError(_NO_MEMORY)


def cache_strides(cache: Tensor) -> tuple[int, int, int]:
    """(block, token, head) of a layer's keys or values [B, block size, G, row], in elements, in any order of memory."""
    assert cache.stride(3) == 1 or cache.shape[3] <= 1, "the numbers of a row must be neighbours"
    return cache.stride(0), cache.stride(1), cache.stride(2)


def describe_cache(k_cache: Tensor, v_cache: Tensor) -> CCache:
    assert k_cache.dtype == v_cache.dtype
    assert k_cache.shape == v_cache.shape and k_cache.stride() == v_cache.stride()
    block, token, head = cache_strides(k_cache)
    return CCache(
        k=k_cache.data_ptr(),
        v=v_cache.data_ptr(),
        block_stride=block,
        token_stride=token,
        head_stride=head,
        block_size=k_cache.shape[1],
        format=KvFormat.of(k_cache.dtype),
    )
