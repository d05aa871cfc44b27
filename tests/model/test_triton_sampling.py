"""The Triton sampler, interpreted, draws the very tokens that the PyTorch sampler draws."""

from __future__ import annotations

import pytest
import torch

import tests.support.triton_interpreter  # noqa: F401  before any kernel
from workers.kernels.triton.sampling import draw_
from workers.sampler import BLOCK, DrawnRows, _draw

VOCAB_SIZE = 5003
NUM_ROWS = 8


def make_logits():
    logits = torch.randn(NUM_ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3
    logits[2, :4000] = -torch.inf
    logits[3] = logits[3].round()  # many ties, at the thresholds too
    return logits


def draw_both_ways(logits, **asked):
    rng = torch.Generator().manual_seed(1)
    keys = {
        "temperature": torch.linspace(0.2, 1.5, NUM_ROWS),
        "seeds": torch.randint(0, 2**62, (NUM_ROWS,), generator=rng),
        "positions": torch.randint(0, 2**40, (NUM_ROWS,), generator=rng),
    }
    expected = _draw(logits.clone(), DrawnRows(rows=slice(None), max_top_k=64, **keys, **asked))
    found = torch.full((NUM_ROWS,), -1)
    draw_(found, logits, rows=None, **keys, **asked)
    return found.tolist(), expected.tolist()


TOP_K = torch.tensor([0, 1, 5, 20, 0, 64, 3, 5000])
TOP_P = torch.tensor([0.5, 1.0, 0.9, 0.3, 1.0, 0.95, 0.01, 0.999])
MIN_P = torch.tensor([0.0, 0.1, 0.01, 0.5, 0.9, 0.0, 0.2, 0.05])


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(None, None, None), (None, None, MIN_P), (TOP_K, TOP_P, None), (TOP_K, TOP_P, MIN_P)]
)
def test_the_same_tokens_are_drawn(top_k, top_p, min_p):
    found, expected = draw_both_ways(make_logits(), top_k=top_k, top_p=top_p, min_p=min_p)
    assert found == expected


def test_only_the_rows_asked_for_are_drawn():
    logits = torch.full((3, 600), -torch.inf)
    logits[torch.arange(3), torch.tensor([7, 300, 599])] = 0.0
    tokens = torch.full((3,), -1)
    ones = torch.ones(2)
    keys = torch.zeros(2, dtype=torch.int64)
    draw_(
        tokens,
        logits,
        rows=torch.tensor([2, 0]),
        temperature=ones,
        seeds=keys,
        positions=keys,
        top_k=None,
        top_p=None,
        min_p=None,
    )
    assert tokens.tolist() == [7, -1, 599]


def test_the_blocks_of_both_samplers_are_the_same():
    from workers.kernels.triton import sampling

    assert sampling.GUMBEL_BLOCK == BLOCK
    assert sampling.TILE % BLOCK == 0
