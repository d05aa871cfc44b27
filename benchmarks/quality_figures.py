"""How far one set of logits is from another: perplexity, divergence, agreement. Owns the definitions.

All figures are over the same scored tokens. Errors are one standard error of the mean, tokens taken as independent, as
llama.cpp's figures are, so that both may stand in one table. Knows no models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Mean:
    value: float
    error: float = 0.0

    @classmethod
    def of(cls, values: Tensor) -> Mean:
        error = float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        return cls(float(values.mean()), error)

    def text(self, digits: int) -> str:
        return f"{self.value:z.{digits}f} ± {self.error:.{digits}f}"


@dataclass(frozen=True, slots=True)
class Figures:
    """One way of computing, against the reference. Divergence is KL(reference || this), in nats for each token."""

    perplexity: Mean
    log_ratio: Mean  # log of this perplexity over the reference's: token by token, so far surer than either
    divergence: Mean
    most_divergence: float
    same_top: float  # share of positions whose likeliest token is the reference's
    mean_logit_gap: float | None = None  # over the whole vocabulary; None: not known
    most_logit_gap: float | None = None


class Expected:
    """The reference's logits of some scored tokens, and what every comparison with them needs."""

    def __init__(self, logits: Tensor, following: Tensor) -> None:
        """logits [T, vocabulary]; following [T], the tokens that come next in the text."""
        self.logits = logits
        self.following = following
        self.log_probabilities = torch.log_softmax(logits, dim=-1)
        self.probabilities = self.log_probabilities.exp()
        self.likeliest = logits.argmax(dim=-1)
        self.losses = self.losses_under(self.log_probabilities)

    def losses_under(self, log_probabilities: Tensor) -> Tensor:
        return -log_probabilities.gather(1, self.following[:, None]).squeeze(1).double()


@dataclass(slots=True)
class Scored:
    """Collects the scored tokens of one way of computing, part by part."""

    _losses: list[Tensor] = field(default_factory=list)
    _log_ratios: list[Tensor] = field(default_factory=list)
    _divergences: list[Tensor] = field(default_factory=list)
    _same_top: list[Tensor] = field(default_factory=list)
    _mean_gaps: list[Tensor] = field(default_factory=list)
    _most_gap: float = 0.0

    def add(self, logits: Tensor, expected: Expected) -> None:
        """logits [T, vocabulary], of the same tokens as the reference's."""
        log_probabilities = torch.log_softmax(logits, dim=-1)
        losses = expected.losses_under(log_probabilities)
        self._losses.append(losses)
        self._log_ratios.append(losses - expected.losses)
        apart = expected.log_probabilities - log_probabilities
        self._divergences.append((expected.probabilities * apart).sum(dim=-1).double())
        self._same_top.append(logits.argmax(dim=-1) == expected.likeliest)
        gaps = (logits - expected.logits).abs()
        self._mean_gaps.append(gaps.mean(dim=-1).double())
        self._most_gap = max(self._most_gap, float(gaps.max()))

    def figures(self) -> Figures:
        loss, divergences = Mean.of(torch.cat(self._losses)), torch.cat(self._divergences)
        perplexity = math.exp(loss.value)
        return Figures(
            perplexity=Mean(perplexity, perplexity * loss.error),
            log_ratio=Mean.of(torch.cat(self._log_ratios)),
            divergence=Mean.of(divergences),
            most_divergence=float(divergences.max()),
            same_top=float(torch.cat(self._same_top).double().mean()),
            mean_logit_gap=float(torch.cat(self._mean_gaps).mean()),
            most_logit_gap=self._most_gap,
        )


@dataclass(frozen=True, slots=True)
class Agreement:
    """Greedy continuations of one way of computing beside the reference's, all of the same length."""

    num_prompts: int
    num_equal: int
    median_parted: float | None  # of those that differ: index of the first token that does
    equal_share: float  # of all tokens, those before the first that differs
    forced_share: float  # of all tokens, those chosen when the reference's tokens come before them

    @classmethod
    def of(
        cls, answers: Sequence[Sequence[int]], reference: Sequence[Sequence[int]], forced: Sequence[Sequence[int]]
    ) -> Agreement:
        equal_until = [_num_equal(own, theirs) for own, theirs in zip(answers, reference, strict=True)]
        lengths = list(map(len, reference))
        parted = [i for i, length in zip(equal_until, lengths, strict=True) if i < length]
        chosen = [
            own == theirs
            for row, answer in zip(forced, reference, strict=True)
            for own, theirs in zip(row, answer, strict=True)
        ]
        return cls(
            num_prompts=len(reference),
            num_equal=len(reference) - len(parted),
            median_parted=median(parted) if parted else None,
            equal_share=sum(equal_until) / sum(lengths),
            forced_share=fmean(chosen),
        )


def _num_equal(own: Sequence[int], theirs: Sequence[int]) -> int:
    return next((i for i, pair in enumerate(zip(own, theirs, strict=True)) if pair[0] != pair[1]), len(theirs))
