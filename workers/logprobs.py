"""Log-probabilities of tokens under raw logits: what a client asked to see, nothing the sampler needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scheduler.output import TokenLogprobs

_FIELDS = ("token_ids", "logprobs", "ranks", "top_ids", "top_logprobs")


def copy_to_host(tensor: Tensor) -> Tensor:
    """A copy of a CUDA tensor in pinned memory, complete when the stream has come so far."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """`TokenLogprobs` still on the device."""

    token_ids: Tensor  # [R]
    logprobs: Tensor  # [R]
    ranks: Tensor  # [R]
    top_ids: Tensor  # [R, K]
    top_logprobs: Tensor  # [R, K]

    @classmethod
    def concatenate(cls, parts: Sequence[Scores]) -> Scores:
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in _FIELDS))

    def copied_to_host(self) -> Scores:
        """The same in pinned memory once the device has come so far; the host does not wait."""
        return self if not self.logprobs.is_cuda else Scores(*(copy_to_host(getattr(self, name)) for name in _FIELDS))

    def to_host(self) -> TokenLogprobs:
        """Waits for the device."""
        return TokenLogprobs(
            token_ids=self.token_ids.to("cpu", torch.int32).numpy(),
            logprobs=self.logprobs.to("cpu", torch.float32).numpy(),
            ranks=self.ranks.to("cpu", torch.int32).numpy(),
            top_ids=self.top_ids.to("cpu", torch.int32).numpy(),
            top_logprobs=self.top_logprobs.to("cpu", torch.float32).numpy(),
        )


def score(logits: Tensor, token_ids: Tensor, num_top: int) -> Scores:
    """Score `token_ids` [R] and the `num_top` likeliest tokens under `logits` [R, vocab].

    A rank counts the tokens that are strictly likelier, from 1.
    """
    logits = logits.to(torch.float32)
    log_total = torch.logsumexp(logits, dim=-1, keepdim=True)
    own = logits.gather(1, token_ids[:, None])
    top, top_ids = torch.topk(logits, min(num_top, logits.shape[1]), dim=-1)
    return Scores(
        token_ids=token_ids,
        logprobs=(own - log_total).squeeze(1),
        ranks=(logits > own).sum(dim=-1) + 1,
        top_ids=top_ids,
        top_logprobs=top - log_total,
    )
