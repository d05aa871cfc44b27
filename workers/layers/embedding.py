"""Token embedding and output head, both split over the ranks by vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.sharding import ALIGNMENT, split_range
from workers.layers.parameter import BuildContext, Piece, ShardedParameter, sharded


class VocabParallelEmbedding(nn.Module):
    """token_ids [T] -> [T, hidden]. A rank embeds the ids it holds; the others add exactly 0."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__()
        self.group = context.group
        self.weight, self.rows = _vocabulary_matrix(context)
        # Rounded to the weights' precision, as the checkpoints' own library multiplies by it.
        scale = context.spec.embedding_scale
        self.scale = None if scale is None else torch.tensor(scale, dtype=context.dtype).item()

    def forward(self, token_ids: Tensor) -> Tensor:
        embedded = F.embedding(token_ids, self.weight) if self.group.size == 1 else self._embed_part(token_ids)
        return embedded if self.scale is None else embedded.mul_(self.scale)

    def _embed_part(self, token_ids: Tensor) -> Tensor:
        if not self.rows:
            return self.group.all_reduce(self.weight.new_zeros(len(token_ids), self.weight.shape[1]))
        local = token_ids - self.rows.start
        elsewhere = (local < 0) | (local >= len(self.rows))
        embedded = F.embedding(local.masked_fill_(elsewhere, 0), self.weight)
        return self.group.all_reduce(embedded.masked_fill_(elsewhere.unsqueeze(-1), 0.0))


class ParallelLMHead(nn.Module):
    """hidden [R, hidden] -> logits [R, vocabulary] in float32, whole on every rank.

    Given `tied`, it uses that embedding's weight instead of its own.
    """

    def __init__(self, context: BuildContext, tied: VocabParallelEmbedding | None) -> None:
        super().__init__()
        self.group = context.group
        self.soft_cap = context.spec.logit_soft_cap
        self.part_sizes = [len(part) for part in _vocabulary_parts(context)]
        self._tied = (tied,)  # in a tuple, so that the weight is not registered twice
        if tied is None:
            self.weight, _ = _vocabulary_matrix(context)

    def forward(self, hidden: Tensor) -> Tensor:
        (tied,) = self._tied
        logits = F.linear(hidden, self.weight if tied is None else tied.weight)
        logits = self.group.all_gather(logits, self.part_sizes).float()
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits


def _vocabulary_parts(context: BuildContext) -> tuple[range, ...]:
    return split_range(context.spec.vocab_size, context.group.size, ALIGNMENT)


def _vocabulary_matrix(context: BuildContext) -> tuple[ShardedParameter, range]:
    """This rank's rows of a [vocabulary, hidden] matrix, and which they are."""
    rows = _vocabulary_parts(context)[context.group.rank]
    hidden = context.spec.hidden_size
    piece = Piece(
        target=range(len(rows)), rows=rows, columns=range(hidden), full_shape=(context.spec.vocab_size, hidden)
    )
    return sharded(context.empty(len(rows), hidden), [piece]), rows
