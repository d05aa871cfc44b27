"""Compiles every Triton kernel for GPUs that are not there and prints what came out, one JSON object per kernel.

    python -m tests.support.triton_launches 90

A process of its own, because the tests' process interprets kernels instead.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import torch

from tests.support.triton_compile import compiling_for
from workers.kernels.triton.activation import gated
from workers.kernels.triton.decode import Partials, decode_attention, plan_splits
from workers.kernels.triton.norm import add_rms_norm, rms_norm
from workers.kernels.triton.prefill import prefill_attention
from workers.kernels.triton.rotary import rotate_
from workers.kernels.triton.sampling import draw_
from workers.kernels.triton.store import store_kv
from workers.kernels.triton.tuning import Device

NUM_MULTIPROCESSORS = {80: 108, 90: 132, 100: 148, 120: 188}
FULLY_CHECKED = 90
BF16 = torch.bfloat16


def launch_attention(capability, *, heads, head_dim, block_size, max_seqlen_q=512, window=None, soft_cap=None):
    device = Device(capability, NUM_MULTIPROCESSORS[capability])
    num_heads, num_kv_heads = heads
    q = torch.zeros(3, num_heads, head_dim, dtype=BF16)
    k_cache, v_cache = (torch.zeros(4, block_size, num_kv_heads, head_dim, dtype=BF16) for _ in range(2))
    step = {
        "seq_lens": torch.zeros(3, dtype=torch.int32),
        "block_tables": torch.zeros(3, 16, dtype=torch.int32),
        "device": device,
        "scale": 0.1,
        "soft_cap": soft_cap,
    }
    starts = torch.zeros(4, dtype=torch.int32)
    prefill_attention(
        q, k_cache, v_cache, q.clone(), cu_seqlens_q=starts, max_seqlen_q=max_seqlen_q, window=window, **step
    )
    plan = plan_splits(step["seq_lens"], num_kv_heads=num_kv_heads, window=window, device=device)
    partials = Partials.allocate(plan.items.shape[0], num_heads, head_dim, q.device)
    decode_attention(q, k_cache, v_cache, q.clone(), plan=plan, partials=partials, **step)


def launch_layers():
    x, weight = torch.zeros(4, 4096, dtype=BF16), torch.zeros(4096, dtype=BF16)
    rms_norm(x, weight, 1e-6)
    add_rms_norm(x, x.clone(), weight, 1e-6)
    for activation in ("silu", "gelu_tanh"):
        gated(torch.zeros(4, 28672, dtype=BF16), activation)
    qkv, angles = torch.zeros(4, 48, 128, dtype=BF16), torch.zeros(4, 1, 64, dtype=BF16)
    rotate_(qkv, 32, 8, angles, angles)
    rotate_(qkv, 32, 8, angles, angles, q_weight=weight[:128], k_weight=weight[:128])
    cache = torch.zeros(5, 16, 8, 128, dtype=BF16)
    store_kv(qkv[:, 32:40], qkv[:, 40:], cache, cache.clone(), torch.zeros(4, dtype=torch.int64))


def launch_sampler(*, filters):
    numbers, floats = torch.zeros(4, dtype=torch.int64), torch.zeros(4)
    asked = (
        {"top_k": numbers, "top_p": floats, "min_p": floats} if filters else dict.fromkeys(("top_k", "top_p", "min_p"))
    )
    keys = {"temperature": floats, "seeds": numbers, "positions": numbers}
    draw_(numbers, torch.zeros(4, 151936), rows=None, **keys, **asked)


def compile_for(capability):
    with compiling_for(capability) as found:
        launch_attention(capability, heads=(32, 8), head_dim=128, block_size=64)
        launch_sampler(filters=True)
        if capability == FULLY_CHECKED:
            launch_attention(capability, heads=(16, 2), head_dim=64, block_size=16, max_seqlen_q=4)
            launch_attention(capability, heads=(3, 1), head_dim=256, block_size=256, window=512, soft_cap=50.0)
            launch_layers()
            launch_sampler(filters=False)
    return found


if __name__ == "__main__":
    for compiled in compile_for(int(sys.argv[1])):
        print(json.dumps(dataclasses.asdict(compiled)))
