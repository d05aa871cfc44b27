"""The product with fp8 weights in blocks, interpreted, against plain PyTorch."""

from __future__ import annotations

import pytest
import torch

import tests.support.triton_interpreter  # noqa: F401  before any kernel
from configs.quantization import QuantizationSpec
from workers.kernels.triton.fp8_product import quantize_groups
from workers.quantization.fp8_block_matrix import Fp8BlockMatrix
from workers.quantization.fp8_matrix import quantize_tokens
from workers.quantization.kept import KeptPlace
from workers.quantization.placement import random_slice
from workers.quantization.slices import Fp8Slice

FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}


def make_matrix(num_rows, num_columns, width=128):
    spec = QuantizationSpec(format="fp8", block=(128, width))
    weight = random_slice(spec, num_rows, num_columns)
    matrix = Fp8BlockMatrix(spec, KeptPlace(num_rows, num_columns, (), torch.device("cpu")))
    matrix.load([weight])
    return matrix, weight


def make_x(num_tokens, num_columns, dtype):
    """Tokens and groups of very different size, some of them all zeros."""
    x = torch.randn(num_tokens, num_columns, generator=torch.Generator().manual_seed(1))
    x *= torch.logspace(-2, 2, num_columns)
    x[0, : num_columns // 2] = 0.0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_activations_are_quantised_group_by_group(dtype):
    x = make_x(5, 352, dtype)
    values, scales = quantize_groups(x, 128)
    for group, part in enumerate(x.split(128, dim=1)):
        expected, scale = quantize_tokens(part)
        assert torch.equal(scales[group], scale[:, 0])
        assert torch.equal(values[:, 128 * group : 128 * (group + 1)].float(), expected.float())


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "num_columns", "width", "dtype"),
    [
        (1, 64, 256, 128, torch.bfloat16),
        (3, 48, 384, 128, torch.float32),  # rows that fill no tile
        (16, 96, 208, 128, torch.float16),  # a last group that is cut
        (40, 80, 256, 64, torch.bfloat16),
        (150, 144, 160, 32, torch.float32),  # several tiles of tokens
    ],
)
def test_the_product_is_that_of_plain_pytorch(num_tokens, num_rows, num_columns, width, dtype):
    matrix, weight = make_matrix(num_rows, num_columns, width)
    x = make_x(num_tokens, num_columns, dtype)
    found, expected = matrix(x, None), Fp8BlockMatrix.reference(x, weight)
    assert found.dtype == dtype
    assert float((found.float() - expected).norm() / expected.norm()) < TOLERANCE[dtype]


def test_a_bias_is_added_and_rows_may_lie_apart():
    matrix, weight = make_matrix(32, 128)
    wide = make_x(4, 256, torch.float32)
    x, bias = wide[:, 128:], torch.linspace(-1e4, 1e4, 32)
    expected = Fp8BlockMatrix.reference(x.contiguous(), weight) + bias
    torch.testing.assert_close(matrix(x, bias), expected, rtol=1e-5, atol=1e-2)


def test_a_token_that_is_no_number_shows_and_the_others_are_right():
    matrix, weight = make_matrix(32, 256)
    x = make_x(3, 256, torch.float32)
    x[1, 200] = torch.nan
    found = matrix(x, None)
    assert found[1].isnan().all()
    torch.testing.assert_close(found[::2], Fp8BlockMatrix.reference(x, weight)[::2], rtol=1e-5, atol=1e-3)


def test_every_row_has_the_scale_of_its_own_block():
    """Rows of two modules, the second of which begins in the middle of a block."""
    spec = QuantizationSpec(format="fp8", block=(128, 128))
    parts = [
        Fp8Slice(torch.ones(rows, 128).to(FP8), torch.tensor(scales)[:, None], torch.zeros(128, dtype=torch.int64))
        for rows, scales in ((16, [1.0] * 16), (32, [2.0] * 10 + [4.0] * 22))
    ]
    matrix = Fp8BlockMatrix(spec, KeptPlace(48, 128, (), torch.device("cpu")))
    matrix.load(parts)
    assert matrix(torch.ones(1, 128), None)[0].tolist() == [128.0] * 16 + [256.0] * 10 + [512.0] * 22
