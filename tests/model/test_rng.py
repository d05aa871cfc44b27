"""The counter-based generator against its published answers."""

from __future__ import annotations

import pytest
import torch

from workers.rng import gumbel, philox


# Known answers for philox4x32-10, published with the paper's reference implementation (Random123, kat_vectors).
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_words(counter, key, expected):
    words = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert [int(word) for word in words] == expected


def test_noise_depends_on_seed_and_position_alone():
    seeds, positions = torch.tensor([7, 7, 8, 2**62 + 7]), torch.tensor([3, 4, 3, 3])
    noise = gumbel(seeds, positions, 10)
    assert len({tuple(row) for row in noise.tolist()}) == 4
    torch.testing.assert_close(gumbel(seeds[2:3], positions[2:3], 33)[:, :10], noise[2:3], rtol=0, atol=0)


def test_noise_has_the_moments_of_a_gumbel_distribution():
    noise = gumbel(torch.arange(64), torch.full((64,), 5), 2048)
    assert abs(noise.mean().item() - 0.577216) < 0.02
    assert abs(noise.var().item() - 1.644934) < 0.04
