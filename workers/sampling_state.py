"""The sampling parameters of the running sequences, one row per slot, and the rows of one step cut out of them.

Columns of numbers on the host; what a step needs is gathered and sent to the device only when the set of rows or
their parameters changed, positions and minimum lengths aside. Knows no logits (`workers.sampler` does).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scheduler.output import AdmittedSequence, Int32
from workers.sampler import DrawnRows, PenalisedRows, SamplingRows
from workers.token_counts import TokenCounts
from workers.upload import upload

NOT_ASKED = -1  # in the logprobs columns


class SamplingState:
    """Sampling parameters by slot."""

    def __init__(self, num_slots: int, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device) -> None:
        self.device = device
        self.counts = TokenCounts(num_slots, vocab_size, device)
        self.num_logprobs = np.full(num_slots, NOT_ASKED, dtype=np.int32)
        self.num_prompt_logprobs = np.full(num_slots, NOT_ASKED, dtype=np.int32)
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._temperature = np.zeros(num_slots, dtype=np.float32)
        self._top_k = np.zeros(num_slots, dtype=np.int64)
        self._top_p = np.ones(num_slots, dtype=np.float32)
        self._min_p = np.zeros(num_slots, dtype=np.float32)
        self._seed = np.zeros(num_slots, dtype=np.int64)
        self._penalties = np.zeros((num_slots, 3), dtype=np.float32)  # repetition, presence, frequency
        self._has_penalties = np.zeros(num_slots, dtype=np.bool_)
        self._has_bias = np.zeros(num_slots, dtype=np.bool_)
        self._min_length = np.zeros(num_slots, dtype=np.int64)  # prompt and completion, below which nothing may stop
        self._bias: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        self._stop_ids: dict[int, NDArray[np.int64]] = {}
        self._cached_slots: Int32 | None = None
        self._cached = SamplingRows()

    def admit(self, sequence: AdmittedSequence) -> None:
        slot, params = sequence.slot, sequence.sampling_params
        self.release(slot)
        self._temperature[slot] = params.temperature
        self._top_k[slot] = params.top_k if params.top_k < self._vocab_size else 0
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seed[slot] = sequence.seed
        self._penalties[slot] = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        self.num_logprobs[slot] = NOT_ASKED if params.logprobs is None else params.logprobs
        self.num_prompt_logprobs[slot] = NOT_ASKED if params.prompt_logprobs is None else params.prompt_logprobs
        if params.has_penalties:
            self._has_penalties[slot] = True
            self.counts.admit(slot, sequence.token_ids, sequence.num_prompt_tokens)
        if params.logit_bias:
            self._has_bias[slot] = True
            biases = np.array(list(params.logit_bias.values()), dtype=np.float32)
            self._bias[slot] = (np.array(list(params.logit_bias), dtype=np.int64), biases)
        if params.min_tokens:
            stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)}
            self._min_length[slot] = sequence.num_prompt_tokens + params.min_tokens
            self._stop_ids[slot] = np.array(sorted(stop_ids), dtype=np.int64)

    def release(self, slot: int) -> None:
        self._cached_slots = None
        self._min_length[slot] = 0
        self._stop_ids.pop(slot, None)
        if self._has_penalties[slot]:
            self._has_penalties[slot] = False
            self.counts.release(slot)
        if self._has_bias[slot]:
            self._has_bias[slot] = False
            del self._bias[slot]

    def rows(self, slots: Int32, positions: Int32) -> SamplingRows:
        """What the rows of `slots` ask of the sampler; `positions` are the indices of the tokens to be sampled."""
        if self._cached_slots is None or not np.array_equal(slots, self._cached_slots):
            self._cached = self._gather(slots)
            self._cached_slots = slots.copy()
        asked = self._cached
        early = np.flatnonzero(positions < self._min_length[slots])
        if asked.drawn is None and not len(early):
            return asked
        return replace(
            asked,
            drawn=self._at_positions(asked.drawn, positions),
            forbidden=self._forbidden(slots, early) if len(early) else None,
        )

    def lasting_rows(self, slots: Int32, positions: Int32) -> SamplingRows | None:
        """What `rows` gives, if it stays so from step to step but for positions, and asks for no more than tokens."""
        asked = self.rows(slots, positions)
        adjusts = asked.penalised is not None or asked.biased is not None or asked.forbidden is not None
        return None if adjusts or (self.num_logprobs[slots] != NOT_ASKED).any() else asked

    def count_sampled(self, asked: SamplingRows, tokens: Tensor) -> None:
        """Take the sampled tokens [R] into the counts of the rows that penalise repetition."""
        if asked.penalised is not None:
            self.counts.add(asked.penalised.count_rows, tokens[asked.penalised.rows])

    def _gather(self, slots: Int32) -> SamplingRows:
        is_drawn = self._temperature[slots] > 0
        num_drawn = int(is_drawn.sum())
        greedy: Tensor | slice | None = None
        if num_drawn < len(slots):
            greedy = slice(None) if num_drawn == 0 else self._put(np.flatnonzero(~is_drawn))
        return SamplingRows(
            greedy=greedy,
            drawn=self._drawn(slots, is_drawn) if num_drawn else None,
            penalised=self._penalised(slots) if self._has_penalties[slots].any() else None,
            biased=self._biased(slots) if self._has_bias[slots].any() else None,
        )

    def _drawn(self, slots: Int32, is_drawn: NDArray[np.bool_]) -> DrawnRows:
        rows = np.flatnonzero(is_drawn)
        slots = slots[rows]
        top_k, top_p, min_p = self._top_k[slots], self._top_p[slots], self._min_p[slots]
        asks_top = bool((top_k > 0).any() or (top_p < 1).any())
        return DrawnRows(
            rows=slice(None) if is_drawn.all() else self._put(rows),
            temperature=self._put(self._temperature[slots]),
            seeds=self._put(self._seed[slots]),
            positions=self._put(np.zeros(len(rows), dtype=np.int64)),  # a step puts its own in
            min_p=self._put(min_p) if (min_p > 0).any() else None,
            top_k=self._put(top_k) if asks_top else None,
            top_p=self._put(top_p) if asks_top else None,
            max_top_k=int(top_k.max()),
        )

    def _at_positions(self, drawn: DrawnRows | None, positions: Int32) -> DrawnRows | None:
        if drawn is None:
            return None
        return replace(drawn, positions=self._put(positions.astype(np.int64))[drawn.rows])

    def _penalised(self, slots: Int32) -> PenalisedRows:
        rows = np.flatnonzero(self._has_penalties[slots])
        repetition, presence, frequency = self._put(self._penalties[slots[rows]]).split(1, dim=1)
        return PenalisedRows(
            rows=self._put(rows),
            count_rows=self.counts.rows(slots[rows]),
            repetition=repetition,
            presence=presence,
            frequency=frequency,
        )

    def _biased(self, slots: Int32) -> tuple[Tensor, Tensor, Tensor]:
        rows = np.flatnonzero(self._has_bias[slots])
        ids, biases = zip(*(self._bias[slot] for slot in slots[rows].tolist()), strict=True)
        repeated = np.repeat(rows, [len(part) for part in ids])
        return self._put(repeated), self._put(np.concatenate(ids)), self._put(np.concatenate(biases))

    def _forbidden(self, slots: Int32, early: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        ids = [self._stop_ids[slot] for slot in slots[early].tolist()]
        return self._put(np.repeat(early, [len(part) for part in ids])), self._put(np.concatenate(ids))

    def _put(self, array: NDArray) -> Tensor:
        return upload((array,), self.device)[0]
