"""Counter-based random numbers, so that a draw depends on its seed and position and on nothing that ran before.

Philox 4x32-10: J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. It is
written in int64 tensor operations, which run alike on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four 32-bit words for each 128-bit counter under a 64-bit key; all int64 tensors that broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_index in range(_NUM_ROUNDS):
        if round_index:
            k0 = (k0 + _KEY_STEPS[0]) & _MASK
            k1 = (k1 + _KEY_STEPS[1]) & _MASK
        # The product of two 32-bit words wraps into int64's sign: shift, then mask the sign's copies away.
        low = c0 * _MULTIPLIERS[0]
        high = c2 * _MULTIPLIERS[1]
        c0, c1 = ((high >> 32) & _MASK) ^ c1 ^ k0, high & _MASK
        c2, c3 = ((low >> 32) & _MASK) ^ c3 ^ k1, low & _MASK
    return c0, c1, c2, c3


def gumbel(seeds: Tensor, positions: Tensor, count: int) -> Tensor:
    """Standard Gumbel noise [R, count], float64, for rows keyed by (seed, position), both int64 [R].

    Row r's numbers depend on its key alone; number i depends on i and the key, not on `count`.
    """
    index = torch.arange((count + 3) // 4, device=seeds.device)
    zero = torch.zeros_like(index)
    seeds, positions = seeds[:, None], positions[:, None]
    key = (seeds & _MASK, (seeds >> 32) & _MASK)
    words = philox((index, positions & _MASK, (positions >> 32) & _MASK, zero), key)
    uniform = (torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(1)[:, :count].double() + 0.5) / 2**32
    return -torch.log(-torch.log(uniform))
