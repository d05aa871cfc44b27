"""How often each token occurred in the sequences that penalise repetition.

Lives on the device, because one step ahead the host does not know the last token yet. Only sequences with penalties
take a row; the rows are allocated when the first of them comes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from scheduler.output import Int32
from workers.upload import upload

_FIRST_CAPACITY = 4


class TokenCounts:
    """Rows of counts, each owned by one slot."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._row_of_slot = np.full(num_slots, -1, dtype=np.int64)
        self._free_rows: list[int] = []
        self._output = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._seen = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)

    def admit(self, slot: int, token_ids: Int32, num_prompt_tokens: int) -> None:
        self.release(slot)
        if not self._free_rows:
            self._grow()
        row = self._free_rows.pop()
        self._row_of_slot[slot] = row
        (ids,) = upload((token_ids.astype(np.int64),), self._output.device)
        generated = ids[num_prompt_tokens:]
        self._seen[row].fill_(False).index_fill_(0, ids, True)
        self._output[row].zero_().index_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))

    def release(self, slot: int) -> None:
        row = int(self._row_of_slot[slot])
        if row >= 0:
            self._free_rows.append(row)
            self._row_of_slot[slot] = -1

    def rows(self, slots: Int32) -> Tensor:
        """Where the counts of these slots lie, int64."""
        rows = self._row_of_slot[slots]
        assert (rows >= 0).all(), "a slot without counts"
        return upload((rows,), self._output.device)[0]

    def seen(self, rows: Tensor) -> Tensor:
        """[R, vocab] bool: the token occurs in prompt or output."""
        return self._seen[rows]

    def output(self, rows: Tensor) -> Tensor:
        """[R, vocab] int32: occurrences in the output."""
        return self._output[rows]

    def add(self, rows: Tensor, token_ids: Tensor) -> None:
        """Count one more token for each row; no row twice."""
        self._output[rows, token_ids] += 1
        self._seen[rows, token_ids] = True

    def _grow(self) -> None:
        old = self._output.shape[0]
        added = min(max(_FIRST_CAPACITY, old), len(self._row_of_slot) - old)
        assert added > 0, "more rows than slots"
        self._output = torch.cat([self._output, self._output.new_zeros((added, self._output.shape[1]))])
        self._seen = torch.cat([self._seen, self._seen.new_zeros((added, self._seen.shape[1]))])
        self._free_rows.extend(range(old + added - 1, old - 1, -1))
