"""The GPU check's sections, and the report that they make."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from benchmarks import gpu_kernels, gpu_model, gpu_quantized
from benchmarks.gpu_scene import Ceilings, measure_ceilings
from benchmarks.report import heading, markdown_table

WHAT, MICROSECONDS, SHARE = "what", "us", "of the copy's rate"


class Section(NamedTuple):
    title: str
    columns: tuple[str, ...]
    rows: Callable[[], Iterable[tuple[object, ...]]]


def sections(ceilings: Ceilings) -> dict[str, Section]:
    """By name, in the order they run."""
    steps = (WHAT, "ms per step", "ms on the device", "floor, ms", "device / floor", "device idle")
    return {
        "backends": Section(
            "Attention backends of this machine",
            ("backend", "block size", "KV cache", "says"),
            gpu_kernels.check_backends,
        ),
        "attention": Section(
            "Attention against PyTorch in float32, unwritten places NaN",
            ("block size / heads / head size / type / window / soft cap", "error", "verdict"),
            gpu_kernels.check_attention,
        ),
        "layers": Section(
            "Fused layers and sampler against PyTorch",
            (WHAT, "error", "verdict"),
            gpu_kernels.check_layers,
        ),
        "quantized": Section(
            "Products with quantised weights against PyTorch",
            (WHAT, "error", "verdict"),
            gpu_quantized.check_quantized,
        ),
        "graphs": Section(
            "Tokens from captured graphs against eager steps",
            (WHAT, "tokens", "verdict"),
            gpu_model.check_graphs,
        ),
        "waiting": Section(
            "Whether launching a step waits for the device",
            (WHAT, "waits", "verdict"),
            gpu_model.check_waiting,
        ),
        "memory": Section(
            "Memory in use, against the share of it that was promised",
            (WHAT, "GiB", "of the share", "verdict"),
            gpu_model.check_memory,
        ),
        "decode": Section(
            "Decode attention, 32:8 heads of 128, queries in bf16",
            (WHAT, MICROSECONDS, "TB/s", SHARE),
            lambda: gpu_kernels.time_decode(ceilings),
        ),
        "prefill": Section(
            "Prefill attention, 32:8 heads of 128, queries in bf16",
            (WHAT, MICROSECONDS, "TFLOP/s", "of the matrix rate", "of torch's best on contiguous keys"),
            lambda: gpu_kernels.time_prefill(ceilings),
        ),
        "ops": Section(
            "Fused layers, bf16",
            (WHAT, MICROSECONDS, "TB/s", SHARE),
            lambda: gpu_kernels.time_layers(ceilings),
        ),
        "products": Section(
            "Products with weights kept quantised, and the same in bf16",
            (WHAT, "us, quantised", "us, bf16", "times as fast"),
            gpu_quantized.time_quantized,
        ),
        "sampler": Section(
            "Sampler, 151,936 tokens",
            (WHAT, "us, own kernel", "us, PyTorch with its launches"),
            gpu_kernels.time_sampler,
        ),
        "small": Section("Decode steps", steps, lambda: gpu_model.time_steps("Qwen3-0.6B", ceilings)),
        "large": Section("Decode steps", steps, lambda: gpu_model.time_steps("Llama-3.1-8B", ceilings, with_fp8=True)),
        "engine": Section(
            "A whole engine, Qwen3-0.6B's shape",
            (WHAT, "tokens in", "tokens out", "s", "tokens out per s"),
            gpu_model.time_engine,
        ),
    }


def names() -> list[str]:
    return list(sections(Ceilings(1.0, 1.0)))


def run(only: list[str] | None, write: Callable[[str], None]) -> bool:
    """Whether everything was right."""
    write(heading(("torch", "triton")))
    properties = torch.cuda.get_device_properties(0)
    ceilings = measure_ceilings()
    write(
        f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{properties.multi_processor_count} multiprocessors; a copy moves {ceilings.copy_bytes_per_s / 1e12:.2f} "
        f"TB/s, a bf16 product of 8192 x 8192 x 8192 runs at {ceilings.bf16_flops / 1e12:.0f} TFLOP/s\n"
    )
    is_right = True
    for name, (title, columns, rows) in sections(ceilings).items():
        if only and name not in only:
            continue
        started = time.monotonic()
        found: list[tuple[object, ...]] = []
        try:
            torch.cuda.empty_cache()
            found.extend(rows())
        except Exception:  # the others shall still be checked
            write(f"{name} failed:\n```\n{traceback.format_exc()}```\n")
            is_right = False
        is_right = is_right and not any("WRONG" in row for row in found)
        write(f"## {title}\n\n{markdown_table(columns, found)}\n{time.monotonic() - started:.0f} s\n")
    return is_right
