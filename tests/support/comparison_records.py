"""What `benchmarks.peers.compare` writes down, in little: two systems that ran twice, and one that did not start."""

from __future__ import annotations

from typing import Any


def record(system: str, seed: int, **workloads: dict[str, float]) -> dict[str, Any]:
    runs = {name: [{"wall_s": 1.0, "errors": [], **figures}] for name, figures in workloads.items()}
    return {"system": system, "version": "1", "seed": seed, "workloads": runs}


RECORDS = [
    record("ours-int8", 0, W4={"output_tokens_per_s": 100.0, "ttft_p50_ms": 20.0}, W2={"output_tokens_per_s": 380.0}),
    record("llama-q8_0", 0, W4={"output_tokens_per_s": 50.0, "ttft_p50_ms": 10.0}, W2={"output_tokens_per_s": 4.0}),
    record("ours-int8", 1, W4={"output_tokens_per_s": 120.0, "ttft_p50_ms": 30.0}),
    record("llama-q8_0", 1, W4={"output_tokens_per_s": 30.0, "ttft_p50_ms": 10.0}),
    {"system": "vllm-fp32", "version": "1", "seed": 0, "error": "ended with 1"},
]
