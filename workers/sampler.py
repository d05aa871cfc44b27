"""The next token of each row: a pure function of logits, sampling parameters, seed, position and token history.

A row gives the same token alone, in any batch, after any preemption and on any rank. Knows neither slots nor plans
(`workers.sampling_state` gathers the rows).

The draw is a Gumbel-max in two stages: first a block of `BLOCK` neighbouring token ids, by the blocks' total
weights, then a token within the block. Each stage takes the largest of `log weight + Gumbel noise`, which draws exactly
in proportion to the weights (a token wins with P(block) * P(token | block)). Why not an inverse CDF over
the vocabulary: its bounds lie closer together than the rounding of the sums that place them, and tokens that are
neighbours in it are not alike in meaning, so logits that differ by 1e-6 between two batch shapes change the drawn
token whenever the uniform number falls among rare tokens, some per cent of all draws at temperature 1. Under
Gumbel noise two candidates must be within that 1e-6 of each other at the top, about two draws in a million,
whatever the size of the vocabulary. Two stages, because one would need fresh noise for every token id.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.rng import gumbel
from workers.token_counts import TokenCounts

BLOCK = 256
NUM_CANDIDATES = 256
"""How many of the likeliest tokens top-p looks at before it sorts the whole vocabulary."""
_CANDIDATE_BLOCK = 32
_SMALLEST_TEMPERATURE = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class DrawnRows:
    """The rows with a temperature; tensors of length R on the device, `rows` of the logits."""

    rows: Tensor | slice
    temperature: Tensor  # float32
    seeds: Tensor  # int64
    positions: Tensor  # int64, index of the token being sampled
    min_p: Tensor | None  # float32; None: nobody asked
    top_k: Tensor | None  # int64, 0: all
    top_p: Tensor | None  # float32; with top_k, both or neither
    max_top_k: int

    @classmethod
    def alike(
        cls,
        num_rows: int,
        device: torch.device,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
    ) -> DrawnRows:
        """Rows that differ in their seeds alone, for trying a sampler."""

        def full(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((num_rows,), value, dtype=dtype, device=device)

        asks_top = top_k > 0 or top_p < 1
        return cls(
            rows=slice(None),
            temperature=full(temperature),
            seeds=torch.arange(num_rows, device=device),
            positions=full(17, torch.int64),
            min_p=full(min_p) if min_p > 0 else None,
            top_k=full(top_k, torch.int64) if asks_top else None,
            top_p=full(top_p) if asks_top else None,
            max_top_k=top_k,
        )


@dataclass(frozen=True, slots=True, eq=False)
class PenalisedRows:
    """The rows with penalties."""

    rows: Tensor
    count_rows: Tensor  # in TokenCounts
    repetition: Tensor  # [R, 1] float32, and so on
    presence: Tensor
    frequency: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """What the rows of one step's logits ask for; None where no row asks."""

    greedy: Tensor | slice | None = None
    drawn: DrawnRows | None = None
    penalised: PenalisedRows | None = None
    biased: tuple[Tensor, Tensor, Tensor] | None = None  # rows, token ids, biases
    forbidden: tuple[Tensor, Tensor] | None = None  # rows, token ids


ChooseTokens = Callable[[Tensor, Tensor, SamplingRows], None]
"""(tokens [R] int64, adjusted logits [R, vocab], what is asked): puts the token of each row in its place.

`workers.compute` takes one of several at start. They choose the same tokens, but for draws so close that the last bits
of a sum decide. In a row with a NaN the greedy token is the first NaN.
"""


def choose_with_torch(tokens: Tensor, logits: Tensor, asked: SamplingRows) -> None:
    """Any device; defines correct."""
    _choose_greedy(tokens, logits, asked)
    if asked.drawn is not None:
        draw_with_torch(tokens, logits, asked.drawn)


def choose_with_triton(tokens: Tensor, logits: Tensor, asked: SamplingRows) -> None:
    """CUDA."""
    _choose_greedy(tokens, logits, asked)
    if asked.drawn is not None:
        draw_with_triton(tokens, logits, asked.drawn)


def sample(
    logits: Tensor, asked: SamplingRows, counts: TokenCounts, choose_tokens: ChooseTokens = choose_with_torch
) -> Tensor:
    """Token ids [R], int64. `logits` [R, vocab] are changed in place where a row asks for it."""
    _adjust(logits, asked, counts)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    choose_tokens(tokens, logits, asked)
    return tokens


def draw_with_torch(tokens: Tensor, logits: Tensor, asked: DrawnRows) -> None:
    """Put the draws of the rows asked for into `tokens` [R]; any device."""
    tokens[asked.rows] = _draw(logits[asked.rows], asked)


def draw_with_triton(tokens: Tensor, logits: Tensor, asked: DrawnRows) -> None:
    """The same tokens in one launch, without a sort; CUDA."""
    from workers.kernels.triton.sampling import draw_

    draw_(
        tokens,
        logits,
        rows=None if isinstance(asked.rows, slice) else asked.rows,
        temperature=asked.temperature,
        seeds=asked.seeds,
        positions=asked.positions,
        top_k=asked.top_k,
        top_p=asked.top_p,
        min_p=asked.min_p,
    )


def _choose_greedy(tokens: Tensor, logits: Tensor, asked: SamplingRows) -> None:
    """The first of the largest."""
    if asked.greedy is not None:
        rows = logits[asked.greedy]
        # On a CPU `max` is several times as quick as `argmax`, and finds the same.
        tokens[asked.greedy] = torch.argmax(rows, dim=-1) if rows.is_cuda else torch.max(rows, dim=-1).indices


def _adjust(logits: Tensor, asked: SamplingRows, counts: TokenCounts) -> None:
    """Bias, penalties, then the tokens that may not come yet."""
    if asked.biased is not None:
        rows, token_ids, biases = asked.biased
        # No place comes twice. An index_put_ that accumulates reads its indices back in some versions of torch.
        logits[rows, token_ids] += biases
    if asked.penalised is not None:
        logits[asked.penalised.rows] = _penalise(logits[asked.penalised.rows], asked.penalised, counts)
    if asked.forbidden is not None:
        logits.index_put_(asked.forbidden, logits.new_full((), -torch.inf))


def _penalise(logits: Tensor, asked: PenalisedRows, counts: TokenCounts) -> Tensor:
    """Repetition as in CTRL (Keskar et al. 2019): towards minus infinity whatever the sign; the others subtract."""
    factor = torch.where(logits > 0, 1.0 / asked.repetition, asked.repetition)
    logits = torch.where(counts.seen(asked.count_rows), logits * factor, logits)
    occurrences = counts.output(asked.count_rows)
    return logits - asked.frequency * occurrences - asked.presence * (occurrences > 0)


def _draw(logits: Tensor, asked: DrawnRows) -> Tensor:
    # From here on, 0 is each row's largest value.
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    scaled /= asked.temperature.clamp(min=_SMALLEST_TEMPERATURE)[:, None]
    threshold = _threshold(scaled, asked)
    if threshold is not None:
        scaled.masked_fill_(scaled < threshold, -torch.inf)
    return _two_stage_gumbel_max(scaled, asked)


def _two_stage_gumbel_max(weights: Tensor, asked: DrawnRows) -> Tensor:
    """Draw from log weights [R, vocab] whose largest is 0 in each row."""
    num_rows, vocab_size = weights.shape
    if vocab_size % BLOCK:
        weights = torch.nn.functional.pad(weights, (0, BLOCK - vocab_size % BLOCK), value=-torch.inf)
    blocks = weights.view(num_rows, -1, BLOCK)
    noise = gumbel(asked.seeds, asked.positions, BLOCK + blocks.shape[1])
    totals = torch.exp(blocks).sum(dim=-1).log_()
    block = torch.argmax(totals + noise[:, BLOCK:], dim=-1)
    within = blocks[torch.arange(num_rows, device=weights.device), block]
    return block * BLOCK + torch.argmax(within + noise[:, :BLOCK], dim=-1)


def _threshold(scaled: Tensor, asked: DrawnRows) -> Tensor | None:
    """[R, 1]: the smallest log weight that top-k, top-p and min-p keep; ties at it are kept too."""
    threshold = None
    if asked.top_k is not None and asked.top_p is not None:
        threshold = _top_threshold(scaled, asked.top_k[:, None], asked.top_p[:, None], asked.max_top_k)
    if asked.min_p is not None:
        floor = torch.log(asked.min_p)[:, None]  # relative to the likeliest token, whose log weight is 0
        threshold = floor if threshold is None else torch.maximum(threshold, floor)
    return threshold


def _top_threshold(scaled: Tensor, top_k: Tensor, top_p: Tensor, max_top_k: int) -> Tensor:
    """Top-k first, then the fewest tokens whose share of what is left reaches top-p.

    Looks at the likeliest candidates only. Rows whose tokens in question reach beyond them sort everything: rare on a
    trained model's logits. CUDA sorts at once, because asking whether it must would wait for the device.
    """
    vocab_size = scaled.shape[1]
    num_candidates = vocab_size if scaled.is_cuda else min(vocab_size, max(NUM_CANDIDATES, max_top_k + 1))
    threshold, is_open = _candidate_threshold(scaled, top_k, top_p, num_candidates)
    if num_candidates < vocab_size and bool(is_open.any()):
        rows = is_open.squeeze(1)
        threshold[rows], _ = _candidate_threshold(scaled[rows], top_k[rows], top_p[rows], vocab_size)
    return threshold


def _candidate_threshold(scaled: Tensor, top_k: Tensor, top_p: Tensor, num_candidates: int) -> tuple[Tensor, Tensor]:
    """The threshold as far as the candidates tell, and whether it lies beyond them."""
    candidates = _largest(scaled, num_candidates)
    has_k = (top_k > 0) & (top_k < scaled.shape[1])
    kth = candidates.gather(1, (top_k - 1).clamp(0, num_candidates - 1))
    kth = torch.where(has_k, kth, -torch.inf)
    weights = torch.exp(candidates).masked_fill_(candidates < kth, 0.0).double()
    sums = torch.cumsum(weights, dim=-1)
    total = torch.where(has_k, sums[:, -1:], torch.exp(scaled).sum(dim=-1, keepdim=True).double())
    is_kept = sums - weights < top_p.double() * total
    num_kept = is_kept.sum(dim=-1, keepdim=True).clamp_(min=1)
    has_p = top_p < 1.0
    pth = torch.where(has_p, candidates.gather(1, num_kept - 1), -torch.inf)
    # With top-k: where its ties, which count among what is left, may go on beyond the candidates.
    is_open = has_p & torch.where(has_k, candidates[:, -1:] == kth, num_kept == num_candidates)
    return torch.maximum(kth, pth), is_open


def _largest(scaled: Tensor, count: int) -> Tensor:
    """The `count` largest values of each row [R, vocab], descending."""
    num_rows, vocab_size = scaled.shape
    if scaled.is_cuda or vocab_size % _CANDIDATE_BLOCK or count * _CANDIDATE_BLOCK * 2 > vocab_size:
        return torch.topk(scaled, count, dim=-1).values
    # They lie in the `count` blocks with the largest maxima: a short selection over blocks, another within those.
    blocks = scaled.view(num_rows, -1, _CANDIDATE_BLOCK)
    chosen = torch.topk(blocks.amax(dim=-1), count, dim=-1, sorted=False).indices
    within = blocks.gather(1, chosen[:, :, None].expand(-1, -1, _CANDIDATE_BLOCK))
    return torch.topk(within.flatten(1), count, dim=-1).values
