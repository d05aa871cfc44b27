"""What computes a loaded model's steps and chooses their tokens, decided once at start and told to the log.

On a CPU that is the C++ kernels where they can be built, else the PyTorch model as it is. Knows neither how the kernels
are built nor what a step holds.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from configs import EngineConfig
from configs.cache_dtype import PYTORCH
from configs.model_spec import ModelSpec
from workers.cpu_decoder import CpuDecoder
from workers.cpu_packing import WeightFormat
from workers.kernels.available import triton_unavailable_reason
from workers.kernels.cpu import CpuKernels, load_kernels
from workers.kernels.cpu.build import KernelsUnavailable
from workers.models.decoder import CausalLM
from workers.parallel import ParallelGroup
from workers.sampler import ChooseTokens, choose_with_torch, choose_with_triton

log = logging.getLogger(__name__)


def choose_compute(
    model: CausalLM,
    config: EngineConfig,
    spec: ModelSpec,
    group: ParallelGroup,
    dtype: torch.dtype,
    *,
    num_threads: int,
) -> CausalLM | CpuDecoder:
    """`model` itself, or a decoder that has taken over its weights and computes on `num_threads` threads.

    Raises:
        ValueError: the configuration insists on what this rank cannot do.
    """
    if group.device.type != "cpu":
        if config.model.quantization != "none":
            raise ValueError(f"model.quantization {config.model.quantization} is for CPUs; set it to none on a GPU")
        return model
    try:
        kernels = _kernels(config, dtype)
    except KernelsUnavailable as reason:
        if config.model.quantization != "none":
            wanted = f"model.quantization {config.model.quantization} needs the C++ kernels"
        elif config.worker.cpu_kernels in ("auto", PYTORCH):
            log.info("compute: PyTorch, without the C++ kernels: %s", reason)
            return model
        else:
            wanted = f"worker.cpu_kernels is {config.worker.cpu_kernels!r}"
        raise ValueError(f"{wanted}: {reason}") from reason
    decoder = CpuDecoder(
        model,
        spec,
        group,
        kernels,
        num_threads=num_threads,
        weight_format=_weight_format(config, dtype),
        max_num_tokens=config.scheduler.max_num_batched_tokens,
    )
    sizes = ", ".join(f"{count / 1e6:.1f} MB {name}" for name, count in decoder.packed_bytes.items())
    log.info("compute: C++ kernels (%s) on %d threads, weights of %s", kernels.description, num_threads, sizes)
    return decoder


def choose_sampler(model: CausalLM | CpuDecoder, device: torch.device) -> ChooseTokens:
    """The quickest that there is for logits of `model`."""
    if isinstance(model, CpuDecoder):
        return model.make_sampler()
    if device.type != "cuda":
        return choose_with_torch
    reason = triton_unavailable_reason(device)
    log.info("sampler: %s", "Triton kernels" if reason is None else f"PyTorch, without Triton: {reason}")
    return choose_with_triton if reason is None else choose_with_torch


def _kernels(config: EngineConfig, dtype: torch.dtype) -> CpuKernels:
    if dtype not in (torch.float32, torch.bfloat16):
        raise KernelsUnavailable(f"they do not compute in {str(dtype).removeprefix('torch.')}")
    return configured_kernels(config)


def configured_kernels(config: EngineConfig) -> CpuKernels:
    """Raises KernelsUnavailable: not wanted, or they cannot be had on this machine."""
    if config.worker.cpu_kernels == PYTORCH:
        raise KernelsUnavailable("worker.cpu_kernels is pytorch")
    cache_dir = None if config.model.cache_dir is None else Path(config.model.cache_dir) / "kernels"
    return load_kernels(config.worker.cpu_kernels, cache_dir)


def _weight_format(config: EngineConfig, dtype: torch.dtype) -> WeightFormat:
    if config.model.quantization != "none":
        return config.model.quantization
    return "bfloat16" if dtype == torch.bfloat16 else "float32"
