"""The C++ sampler chooses the very tokens that the PyTorch sampler chooses, in every instruction set that this machine
runs, on one thread and on two."""

from __future__ import annotations

import math

import pytest
import torch

from workers.cpu_sampler import CpuSampler
from workers.kernels.cpu.library import Pool
from workers.sampler import DrawnRows, SamplingRows, choose_with_torch

pytestmark = pytest.mark.usefixtures("one_thread")

INFINITY = math.inf
VOCAB_SIZES = [1, 5, 255, 256, 257, 1003, 9000]  # whole blocks and not, above PyTorch's candidates and below


@pytest.fixture(scope="module", params=[1, 2], ids=["1-thread", "2-threads"])
def choose(request, kernels):
    """Tokens of logits [R, vocab], by the kernels."""
    pool = Pool(kernels, request.param)

    def tokens_of(logits, asked):
        tokens = torch.full((len(logits),), -1)
        CpuSampler(kernels, pool, logits.shape[1])(tokens, logits, asked)
        return tokens

    return tokens_of


def expected(logits, asked):
    tokens = torch.full((len(logits),), -1)
    choose_with_torch(tokens, logits, asked)
    return tokens


def random(*shape, seed=0, scale=3.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def drawn(num_rows, *, rows=slice(None), temperature=1.0, top_k=None, top_p=None, min_p=None, seed=0):
    """Parameters may be numbers or one number per row; top-k and top-p come together, as a step brings them."""

    def column(value, dtype):
        return None if value is None else torch.as_tensor(value, dtype=dtype).expand(num_rows).contiguous()

    if top_k is not None or top_p is not None:
        top_k, top_p = top_k if top_k is not None else 0, top_p if top_p is not None else 1.0
    rng = torch.Generator().manual_seed(seed)
    return DrawnRows(
        rows=rows,
        temperature=column(temperature, torch.float32),
        seeds=torch.randint(-(2**62), 2**62, (num_rows,), generator=rng),
        positions=torch.randint(0, 2**40, (num_rows,), generator=rng),
        min_p=column(min_p, torch.float32),
        top_k=column(top_k, torch.int64),
        top_p=column(top_p, torch.float32),
        max_top_k=0 if top_k is None else int(column(top_k, torch.int64).max()),
    )


def scenes(vocab_size):
    """Logits [vocab] of every awkward kind, by name."""
    plain = random(vocab_size)
    ramp = torch.arange(vocab_size, dtype=torch.float32)
    mostly_masked, one_left, huge = plain.clone(), torch.full_like(plain, -INFINITY), plain.clone()
    mostly_masked[: vocab_size * 9 // 10] = -INFINITY
    one_left[vocab_size // 2] = -7.0
    huge[vocab_size // 3] = 3e38
    return {
        "plain": plain,
        "flat": torch.zeros(vocab_size),
        "tied": plain.round(),
        "two levels": (ramp % 3 == 0).float(),
        "two above the rest": (ramp < 2).float(),
        "all but flat": ramp * -1e-5,
        "steep": ramp * -5.0,
        "of every magnitude": -torch.logspace(-35, 37, vocab_size),
        "mostly masked": mostly_masked,
        "one left": one_left,
        "masked by a finite number": torch.where(ramp % 2 == 0, plain, -1e30),
        "one huge": huge,
        "as far apart as can be": torch.where(ramp % 7 == 0, 3e38, -3e38),
    }


WAYS = {
    "everything": {},
    "hot": {"temperature": 30.0},
    "cold": {"temperature": 1e-3},
    "colder than counts": {"temperature": 1e-30},
    "top 1": {"top_k": 1},
    "top 2": {"top_k": 2, "temperature": 1.7},
    "top 50": {"top_k": 50, "temperature": 1.5},
    "top 500": {"top_k": 500, "temperature": 20.0},
    "as many as there are": {"top_k": "vocabulary"},
    "all but one": {"top_k": "all but one", "temperature": 20.0},
    "hardly any weight": {"top_p": 1e-9},
    "half the weight": {"top_p": 0.5, "temperature": 1.4},
    "most of the weight": {"top_p": 0.95, "temperature": 0.7},
    "nearly all the weight": {"top_p": 0.99999994, "temperature": 3.0},
    "both": {"top_k": 40, "top_p": 0.8, "temperature": 2.0},
    "both, of many": {"top_k": 400, "top_p": 0.6, "temperature": 9.0},
    "a share of the likeliest": {"min_p": 0.05},
    "as likely as the likeliest": {"min_p": 1.0},
    "all three": {"top_k": 60, "top_p": 0.9, "min_p": 0.02, "temperature": 2.5},
}


def ways_for(vocab_size):
    """`WAYS` as columns, one row each."""
    words = {"vocabulary": vocab_size, "all but one": vocab_size - 1}
    return {
        name: [words.get(way.get(name, default), way.get(name, default)) for way in WAYS.values()]
        for name, default in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
    }


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_every_way_of_drawing_gives_the_tokens_of_pytorch(choose, vocab_size):
    for name, row in scenes(vocab_size).items():
        repeats = 4
        logits = row.expand(repeats * len(WAYS), -1)
        columns = {key: values * repeats for key, values in ways_for(vocab_size).items()}
        asked = SamplingRows(drawn=drawn(len(logits), **columns))
        found, wanted = choose(logits, asked).tolist(), expected(logits, asked).tolist()
        wrong = [(way, a, b) for way, a, b in zip([*WAYS] * repeats, found, wanted, strict=True) if a != b]
        assert wrong == [], name


def test_a_vocabulary_of_a_real_model_gives_the_tokens_of_pytorch(choose):
    logits = random(6, 49157)  # with a last block that is not whole
    logits[4] = logits[4].round()
    for way in ({}, {"top_k": [0, 1, 50, 300, 0, 49156]}, {"top_p": 0.9}, {"top_k": 80, "top_p": 0.7, "min_p": 0.01}):
        asked = SamplingRows(drawn=drawn(6, temperature=[0.3, 0.7, 1.0, 1.3, 2.0, 5.0], **way))
        assert choose(logits, asked).tolist() == expected(logits, asked).tolist(), way


def test_the_first_of_the_largest_is_greedy(choose):
    for size in (*VOCAB_SIZES, 49152):
        logits = random(6, size).round_()
        logits[1] = -INFINITY
        logits[2] = 0.0
        logits[3, -1] = 100.0
        logits[4, size // 2 :] = INFINITY
        asked = SamplingRows(greedy=slice(None))
        assert choose(logits, asked).tolist() == [int((row == row.max()).nonzero()[0]) for row in logits]


@pytest.mark.parametrize("vocab_size", [5, 700])
def test_rows_that_are_no_distribution_give_the_tokens_of_pytorch(choose, vocab_size):
    logits = random(8, vocab_size)
    logits[0, vocab_size - 2 :] = math.nan
    logits[1] = math.nan
    logits[2] = -INFINITY
    logits[3, 2:4] = INFINITY
    logits[4] = INFINITY
    logits[5, 1], logits[5, 3] = INFINITY, math.nan
    logits[6, 1:] = -INFINITY
    for asked in (
        SamplingRows(greedy=slice(None)),
        SamplingRows(drawn=drawn(8)),
        SamplingRows(drawn=drawn(8, top_k=3, top_p=0.5)),
        SamplingRows(drawn=drawn(8, min_p=0.1)),
    ):
        assert choose(logits, asked).tolist() == expected(logits, asked).tolist()


def test_each_row_has_what_it_asks_for_and_no_other_is_touched(choose):
    wide = random(7, 900)
    logits = wide[:, 100:800]  # rows that do not follow each other
    asked = SamplingRows(
        greedy=torch.tensor([5, 0]),
        drawn=drawn(3, rows=torch.tensor([6, 2, 3]), top_k=[1, 0, 7], top_p=[1.0, 0.2, 0.9]),
    )
    found = choose(logits, asked)
    assert found.tolist() == expected(logits, asked).tolist()
    assert found[torch.tensor([1, 4])].tolist() == [-1, -1]
    assert found[5] == logits[5].argmax()
    assert found[6] == logits[6].argmax()


def test_exactly_the_tokens_within_the_bounds_are_drawn(choose):
    logits = random(300, scale=1.0)
    ordered = logits.argsort(descending=True)
    shares = torch.softmax(logits[ordered] / 10, -1).double()
    num_of_half = int((shares.cumsum(-1) - shares < 0.5).sum())
    num_likely = int((shares >= 0.8 * shares[0]).sum())
    assert 20 < num_likely < num_of_half < 200
    for way, count in (({"top_k": 37}, 37), ({"top_p": 0.5}, num_of_half), ({"min_p": 0.8}, num_likely)):
        asked = SamplingRows(drawn=drawn(20_000, temperature=10.0, **way))
        found = set(choose(logits.expand(20_000, -1), asked).tolist())
        assert found == set(ordered[:count].tolist()), way


@pytest.mark.parametrize("vocab_size", [5, 256, 700])
def test_draws_follow_the_softmax(choose, vocab_size):
    logits, count = random(vocab_size, scale=1.5), 40_000
    tokens = choose(logits.expand(count, -1), SamplingRows(drawn=drawn(count, temperature=0.8)))
    wanted = count * torch.softmax(logits / 0.8, -1)
    observed = torch.bincount(tokens, minlength=vocab_size)
    often = wanted >= 10
    chi_square = ((observed - wanted)[often] ** 2 / wanted[often]).sum().item()
    degrees = int(often.sum())
    assert chi_square < degrees + 5 * math.sqrt(2 * degrees)


def test_a_row_is_drawn_alike_alone_and_in_company(choose):
    logits = random(16, 1003)
    columns = {"temperature": torch.linspace(0.2, 2.0, 16), "top_k": torch.arange(16) * 5, "top_p": 0.9}
    asked = drawn(16, **columns)
    together = choose(logits, SamplingRows(drawn=asked))
    for row in range(16):
        alone = DrawnRows(
            rows=slice(None),
            max_top_k=asked.max_top_k,
            min_p=None,
            **{
                name: getattr(asked, name)[row : row + 1]
                for name in ("temperature", "seeds", "positions", "top_k", "top_p")
            },
        )
        assert choose(logits[row : row + 1], SamplingRows(drawn=alone)).tolist() == [int(together[row])]
