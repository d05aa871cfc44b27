"""What prefill and decode attention share: scores in base 2, their soft cap, and a softmax taken tile by tile.

Shape letters: M rows of queries, N keys, D head size.
"""

# Kernels are typed by what they are launched with.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from workers.attention.base import AttentionParams

LOG2_E = 1.4426950408889634


def score_factors(params: AttentionParams) -> tuple[float, float]:
    """The `scale_log2` and `soft_cap` of a launch: the keys' scale is part of the first."""
    scale = params.scale * params.k_scale
    if params.soft_cap is None:
        return scale * LOG2_E, 0.0
    return scale / params.soft_cap, params.soft_cap * LOG2_E


@triton.jit
def scores_of(q_MD, k_ND, scale_log2, soft_cap, HAS_SOFT_CAP: tl.constexpr, PRECISION: tl.constexpr):
    """[M, N] in base 2, of keys in the queries' type."""
    score = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION) * scale_log2
    if HAS_SOFT_CAP:  # scale_log2 is then scale / soft_cap, and soft_cap is in base 2
        score = soft_cap * (2.0 * tl.sigmoid(2.0 * score) - 1.0)
    return score


@triton.jit
def take_in(score, v_ND, highest, total, acc_MD, MAY_SEE_NOTHING: tl.constexpr, PRECISION: tl.constexpr):
    """The running softmax and weighted sum after one more tile; MAY_SEE_NOTHING: rows of -inf alone so far."""
    now_highest = tl.maximum(highest, tl.max(score, 1))
    shift = now_highest
    if MAY_SEE_NOTHING:
        shift = tl.where(now_highest == float("-inf"), 0.0, now_highest)
    weight = tl.exp2(score - shift[:, None])
    fade = tl.exp2(highest - shift)
    total = total * fade + tl.sum(weight, 1)
    acc_MD = acc_MD * fade[:, None]
    acc_MD = tl.dot(weight.to(v_ND.dtype), v_ND, acc_MD, input_precision=PRECISION)
    return now_highest, total, acc_MD
