"""bfloat16 weights in 12 bits: numbers and products as in 16, in every instruction set that this machine can run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.cpu_kernels import linear, read_back
from workers.kernels.cpu.library import Format, PackedMatrix, Then

SHAPES = [(96, 64), (70, 130), (33, 1), (5, 7), (40, 1100)]  # outputs, inputs
ROWS = (1, 3, 12, 13, 17, 33, 70, 300)
WITHOUT_CODES = ("neon", "portable")
FAR_OFF = (3e4, -2e-30, 1e-39, 700.0, -5e20)  # from weights of about 0.1


def trained(*shape, seed=0):
    """Weights as those of a trained model: near a normal distribution."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1).bfloat16().float()


def pack(kernels, pool, weight, bias=None, *, coded=True, **more):
    return PackedMatrix(kernels, pool, weight, bias, format=Format.BFLOAT16, coded=coded, **more)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_the_weights_in_16_bits(kernels, pool, shape, exact):
    weight, bias = trained(*shape), trained(shape[0], seed=1)
    coded, plain = (pack(kernels, pool, weight, bias, coded=coded, exact=exact) for coded in (True, False))
    for num_rows in ROWS:
        x = trained(num_rows, shape[1], seed=num_rows)
        actual, expected = (linear(kernels, pool, matrix, x, shape[0], Then.STORE) for matrix in (coded, plain))
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("exact", [True, False])
def test_gated_products_are_those_of_the_weights_in_16_bits(kernels, pool, exact):
    weight = trained(2 * 72, 200)
    coded, plain = (pack(kernels, pool, weight, coded=coded, gated=True, exact=exact) for coded in (True, False))
    for num_rows in (1, 8, 40):
        x = 5 * trained(num_rows, 200, seed=num_rows)
        actual, expected = (linear(kernels, pool, matrix, x, 72, Then.SILU_TIMES_UP) for matrix in (coded, plain))
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("far_off", FAR_OFF)
def test_a_weight_that_has_no_code_counts_for_what_it_is(kernels, pool, far_off):
    weight = trained(96, 400)
    places = [(0, 0), (31, 399), (40, 17), (95, 256)]
    for place in places:
        weight[place] = far_off
    weight = weight.bfloat16().float()
    matrix = pack(kernels, pool, weight, exact=True)
    assert matrix.num_bytes == pack(kernels, pool, trained(96, 400)).num_bytes
    assert torch.equal(read_back(kernels, matrix, 96, 400), weight)
    for num_rows in ROWS:
        x = torch.ones(num_rows, 400)
        actual = linear(kernels, pool, matrix, x, 96, Then.STORE)
        torch.testing.assert_close(actual, F.linear(x, weight), rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_is_read_back_to_the_bit(kernels, pool, shape):
    weight = trained(*shape)
    weight[0, 0] = 0
    assert torch.equal(read_back(kernels, pack(kernels, pool, weight), *shape), weight)


def test_coded_weights_take_three_quarters_of_the_memory(kernels, pool):
    weight = trained(96, 256)
    coded, plain = (pack(kernels, pool, weight, coded=coded).num_bytes for coded in (True, False))
    assert coded == (plain if kernels.variant in WITHOUT_CODES else 0.75 * plain)


def test_weights_of_all_sizes_stay_in_16_bits(kernels, pool):
    weight = (trained(96, 256) * torch.logspace(-30, 30, 256)).bfloat16().float()
    coded, plain = (pack(kernels, pool, weight, coded=coded, exact=True) for coded in (True, False))
    assert coded.num_bytes == plain.num_bytes
    assert torch.equal(read_back(kernels, coded, 96, 256), weight)


def test_an_empty_matrix_is_packed(kernels, pool):
    assert pack(kernels, pool, torch.zeros(0, 16)).num_bytes == 0
    linear(kernels, pool, pack(kernels, pool, torch.zeros(32, 0)), torch.zeros(3, 0), 32, Then.STORE)
