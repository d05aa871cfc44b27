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
from workers.attention import AttentionMetadata, AttentionParams
from workers.kernels.triton.activation import gated
from workers.kernels.triton.decode import decode_attention
from workers.kernels.triton.fp8_product import fp8_product
from workers.kernels.triton.norm import add_rms_norm, rms_norm
from workers.kernels.triton.prefill import prefill_attention
from workers.kernels.triton.rotary import rotate_
from workers.kernels.triton.sampling import draw_
from workers.kernels.triton.splits import Partials, plan_splits
from workers.kernels.triton.store import store_kv
from workers.kernels.triton.tuning import Device

NUM_MULTIPROCESSORS = {80: 108, 90: 132, 100: 148, 120: 188}
FULLY_CHECKED = 90
SMALLEST_FP8 = 89
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def launch_attention(
    capability, *, heads, head_dim, block_size, max_seqlen_q=512, cache_dtype=BF16, window=None, soft_cap=None
):
    device = Device(capability, NUM_MULTIPROCESSORS[capability])
    num_heads, num_kv_heads = heads
    q = torch.zeros(max_seqlen_q + 3, num_heads, head_dim, dtype=BF16)
    k_cache, v_cache = (torch.zeros(4, block_size, num_kv_heads, head_dim, dtype=cache_dtype) for _ in range(2))
    params = AttentionParams(scale=0.1, window=window, soft_cap=soft_cap)
    meta = AttentionMetadata.from_lists(
        [max_seqlen_q, 1, 1, 1], [max_seqlen_q, 1, 1, 1], [[0] * 32] * 4, block_size=block_size, num_decodes=3
    )
    store_kv(q[:4, :num_kv_heads], q[:4, :num_kv_heads], k_cache, v_cache, meta.slot_mapping, params)
    prefill_attention(q, k_cache, v_cache, meta, q.clone(), params, device=device)
    plan = plan_splits(meta.seq_lens[1:], num_kv_heads=num_kv_heads, window=window, device=device)
    partials = Partials.allocate(plan.items.shape[0], num_heads, head_dim, q.device)
    decode_attention(q, k_cache, v_cache, meta, q.clone(), params, plan=plan, partials=partials, device=device)


def launch_layers():
    x, weight = torch.zeros(4, 4096, dtype=BF16), torch.zeros(4096, dtype=BF16)
    rms_norm(x, weight, 1e-6)
    add_rms_norm(x, x.clone(), weight, 1e-6)
    for activation in ("silu", "gelu_tanh"):
        gated(torch.zeros(4, 28672, dtype=BF16), activation)
    qkv, angles = torch.zeros(4, 48, 128, dtype=BF16), torch.zeros(4, 1, 64, dtype=BF16)
    rotate_(qkv, 32, 8, angles, angles)
    rotate_(qkv, 32, 8, angles, angles, q_weight=weight[:128], k_weight=weight[:128])


def launch_sampler():
    numbers, floats = torch.zeros(4, dtype=torch.int64), torch.zeros(4)
    keys = {"temperature": floats, "seeds": numbers, "positions": numbers}
    draw_(numbers, torch.zeros(4, 151936), rows=None, **keys, top_k=numbers, top_p=floats, min_p=floats)


def launch_fp8_products(capability):
    """Few tokens, some and many; a bias and a last group that is cut."""
    device = Device(capability, NUM_MULTIPROCESSORS[capability])
    for num_tokens, num_columns in ((1, 4096), (64, 4096), (512, 4096), (512, 4000)):
        weight, scales = torch.zeros(6144, num_columns, dtype=FP8), torch.zeros(-(-num_columns // 128), 6144)
        bias = None if num_columns == 4096 else torch.zeros(6144, dtype=BF16)
        fp8_product(torch.zeros(num_tokens, num_columns, dtype=BF16), weight, scales, bias, group=128, device=device)


def compile_for(capability):
    with compiling_for(capability) as found:
        if capability >= SMALLEST_FP8:
            launch_attention(capability, heads=(32, 8), head_dim=128, block_size=64, cache_dtype=FP8)
            launch_fp8_products(capability)
        launch_attention(capability, heads=(32, 8), head_dim=128, block_size=64)
        launch_sampler()
        if capability == FULLY_CHECKED:
            launch_attention(capability, heads=(16, 2), head_dim=64, block_size=16, max_seqlen_q=4)
            launch_attention(capability, heads=(3, 1), head_dim=256, block_size=256, window=512, soft_cap=50.0)
            launch_attention(
                capability, heads=(16, 2), head_dim=64, block_size=16, max_seqlen_q=4, window=512, cache_dtype=FP8
            )
            launch_attention(capability, heads=(3, 1), head_dim=256, block_size=256, soft_cap=50.0, cache_dtype=FP8)
            launch_layers()
    return found


if __name__ == "__main__":
    for compiled in compile_for(int(sys.argv[1])):
        print(json.dumps(dataclasses.asdict(compiled)))
