"""Log-probabilities on their way back: prompt chunks gathered until the prompt is whole, rows cut out for one token."""

from __future__ import annotations

import numpy as np

from scheduler.output import PromptLogprobs, TokenLogprobs

_FIELDS = ("token_ids", "logprobs", "ranks", "top_ids", "top_logprobs")


class PromptScores:
    """The scored part of one prompt. A preempted prompt is scored again from its start."""

    def __init__(self) -> None:
        self._chunks: list[TokenLogprobs] = []
        self._num_scored = 0

    def add(self, chunk: PromptLogprobs) -> None:
        assert chunk.start == 1 + self._num_scored, f"chunk starts at {chunk.start}, after {self._num_scored} scores"
        self._chunks.append(chunk.scores)
        self._num_scored += len(chunk.scores.token_ids)

    def restart(self) -> None:
        self._chunks.clear()
        self._num_scored = 0

    def whole(self) -> TokenLogprobs:
        """Scores of every prompt token but the first, which nothing precedes."""
        if not self._chunks:
            none = np.empty(0, np.int32)
            return TokenLogprobs(none, none.astype(np.float32), none, none.reshape(0, 0), np.empty((0, 0), np.float32))
        return TokenLogprobs(*(np.concatenate([getattr(chunk, name) for chunk in self._chunks]) for name in _FIELDS))


def row(scores: TokenLogprobs, i: int) -> TokenLogprobs:
    """Row `i` alone."""
    return TokenLogprobs(*(getattr(scores, name)[i : i + 1] for name in _FIELDS))
