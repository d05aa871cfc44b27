"""The fused layer kernels, interpreted, against the PyTorch operations they replace."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tests.support.triton_interpreter  # noqa: F401  before any kernel
from workers.kernels.triton.activation import gated
from workers.kernels.triton.norm import add_rms_norm, rms_norm
from workers.kernels.triton.rotary import rotate_
from workers.layers.rotary import rotate

DTYPES = [torch.float32, torch.float16]


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found, expected):
    tolerance = 2e-6 if found.dtype == torch.float32 else 4e-3
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype):
    x, weight = randn(5, 100, dtype=dtype), randn(100, dtype=dtype, seed=1)
    assert_close(rms_norm(x, weight, 1e-6), F.rms_norm(x, (100,), weight, 1e-6))


def test_rms_norm_with_a_float32_weight():
    x, weight = randn(2, 3, 100, dtype=torch.float16), randn(100, seed=1)
    assert_close(rms_norm(x, weight, 1e-6), F.rms_norm(x.float(), (100,), weight, 1e-6).half())


@pytest.mark.parametrize("dtype", DTYPES)
def test_adding_to_the_residual_before_its_norm(dtype):
    x, residual, weight = (randn(5, 100, dtype=dtype, seed=seed) for seed in range(3))
    weight = weight[0].contiguous()
    expected_sum = residual + x
    normed = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, expected_sum)
    assert_close(normed, F.rms_norm(expected_sum, (100,), weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activations(dtype):
    gate_up = randn(3, 2 * 1100, dtype=dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    assert_close(gated(gate_up, "silu"), F.silu(gate) * up)
    assert_close(gated(gate_up, "gelu_tanh"), F.gelu(gate, approximate="tanh") * up)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("dtype", "heads", "head_dim"), [(torch.float32, (18, 2), 48), (torch.float16, (3, 1), 64)])
def test_rotating_queries_and_keys_in_place(dtype, heads, head_dim, norms):
    num_heads, num_kv_heads = heads
    qkv = randn(4, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    angles = randn(4, 1, head_dim // 2, seed=1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    q_weight, k_weight = (randn(head_dim, dtype=dtype, seed=seed) for seed in (2, 3)) if norms else (None, None)
    q, k, v = qkv.clone().split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if norms:
        q, k = F.rms_norm(q, (head_dim,), q_weight, 1e-6), F.rms_norm(k, (head_dim,), k_weight, 1e-6)
    expected = torch.cat([rotate(q, (cos, sin)), rotate(k, (cos, sin)), v], dim=1)
    rotate_(qkv, num_heads, num_kv_heads, cos, sin, q_weight=q_weight, k_weight=k_weight, eps=1e-6)
    assert_close(qkv, expected)
    assert torch.equal(qkv[:, num_heads + num_kv_heads :], v)
