"""Head norms and rotary embedding of a step's queries and keys, in place, in one launch.

Shape letters: T tokens, H query heads, G key heads, D head size. The fused projection [T, H + 2 G, D] holds the query
heads, then the key heads, then the value heads, which are left alone.
"""

# Kernels are typed by what they are launched with.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from workers.kernels.triton.tuning import next_power_of_2

HEADS_PER_PROGRAM = 16


@triton.jit
def rotate_kernel(
    qkv,
    cos,
    sin,
    q_weight,
    k_weight,
    token_stride,
    head_stride,
    angle_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_ROTATED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NORMS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """One program per token and BLOCK_H heads. A head's halves (a, b) become (a cos - b sin, b cos + a sin)."""
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_HALF)
    is_dim = dim < HALF
    is_real = (head < NUM_ROTATED)[:, None] & is_dim[None, :]
    at = qkv + token * token_stride + head[:, None] * head_stride + dim[None, :]
    a = tl.load(at, mask=is_real, other=0.0).to(tl.float32)
    b = tl.load(at + HALF, mask=is_real, other=0.0).to(tl.float32)
    if NORMS:
        scale = 1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / HEAD_DIM + eps)
        is_query = (head < NUM_HEADS)[:, None]
        q_a = tl.load(q_weight + dim, mask=is_dim, other=0.0).to(tl.float32)
        q_b = tl.load(q_weight + HALF + dim, mask=is_dim, other=0.0).to(tl.float32)
        k_a = tl.load(k_weight + dim, mask=is_dim, other=0.0).to(tl.float32)
        k_b = tl.load(k_weight + HALF + dim, mask=is_dim, other=0.0).to(tl.float32)
        a = a * scale[:, None] * tl.where(is_query, q_a[None, :], k_a[None, :])
        b = b * scale[:, None] * tl.where(is_query, q_b[None, :], k_b[None, :])
    cosine = tl.load(cos + token * angle_stride + dim, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sin + token * angle_stride + dim, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    tl.store(at, a * cosine - b * sine, mask=is_real)
    tl.store(at + HALF, b * cosine + a * sine, mask=is_real)


def rotate_(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    cos: Tensor,
    sin: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """qkv [T, H + 2 G, D] in place; cos, sin [T, 1, D / 2]. Given weights [D], each head is normed before."""
    num_tokens, _, head_dim = qkv.shape
    num_rotated = num_heads + num_kv_heads
    if not num_tokens or not num_rotated:
        return
    assert qkv.stride(2) == 1 and cos.stride(-1) == 1 and cos.stride(0) == sin.stride(0)
    assert (q_weight is None) == (k_weight is None)
    heads = min(HEADS_PER_PROGRAM, next_power_of_2(num_rotated))
    rotate_kernel[(num_tokens, triton.cdiv(num_rotated, heads))](
        qkv,
        cos,
        sin,
        cos if q_weight is None else q_weight,
        cos if k_weight is None else k_weight,
        qkv.stride(0),
        qkv.stride(1),
        cos.stride(0),
        eps,
        NUM_HEADS=num_heads,
        NUM_ROTATED=num_rotated,
        HEAD_DIM=head_dim,
        NORMS=q_weight is not None,
        BLOCK_H=heads,
        BLOCK_HALF=next_power_of_2(head_dim // 2),
        num_warps=4,
    )
