"""The step contract: everything that crosses between the scheduler and its workers.

A worker keeps the state of each running sequence in a *slot*, a row of its persistent batch. The scheduler
describes a sequence whole once, when it is admitted to a slot, and afterwards sends only differences. The
bytes are made in `scheduler.codec`; this file knows neither bytes nor policy.

A worker applies a plan in this order: release slots, admit sequences, append blocks, copy blocks, then compute. Plans
of one epoch are executed in order, so a plan may rely on every KV entry that an earlier plan writes, and on the token
that the worker itself sampled in the step before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scheduler.sampling_params import SamplingParams

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]

UNKNOWN_TOKEN = -1
"""In `decode_tokens`: continue from the token you sampled for this slot in the step before."""


_NOTHING = np.array([], dtype=np.int32)
_NOTHING.setflags(write=False)


def int32(values: list[int] | tuple[int, ...] = ()) -> Int32:
    # Most arrays of most steps are empty: one serves them all.
    return np.array(values, dtype=np.int32) if values else _NOTHING


@dataclass(slots=True, eq=False)
class AdmittedSequence:
    """A sequence sent whole: it takes over `slot`, whatever the slot held before.

    `token_ids` are all tokens known so far, prompt first; after a preemption they include generated ones.
    The KV of the first `num_cached_tokens` is already in the blocks of `block_table`.
    """

    slot: int
    seq_id: int
    seed: int
    num_prompt_tokens: int
    num_cached_tokens: int
    token_ids: Int32
    block_table: Int32
    sampling_params: SamplingParams


@dataclass(slots=True, eq=False)
class StepPlan:
    """One step, scheduler to every rank.

    A prefill row computes the known tokens `prefill_starts` to `prefill_starts + prefill_num_tokens` of its slot; it
    samples if and only if these are the slot's last known tokens. A start beyond the tokens this worker has computed is
    a prefix-cache hit in mid-prompt: their KV is in the blocks the slot just gained. A decode row computes one token,
    `decode_tokens`, and samples.
    """

    engine_epoch: int
    step: int
    released_slots: Int32 = field(default_factory=int32)
    admitted: tuple[AdmittedSequence, ...] = ()
    copied_from: Int32 = field(default_factory=int32)  # block ids, copied on write before anything is computed
    copied_to: Int32 = field(default_factory=int32)
    grown_slots: Int32 = field(default_factory=int32)  # the block table of grown_slots[i] gains grown_blocks[i]
    grown_blocks: Int32 = field(default_factory=int32)
    prefill_slots: Int32 = field(default_factory=int32)
    prefill_starts: Int32 = field(default_factory=int32)
    prefill_num_tokens: Int32 = field(default_factory=int32)
    decode_slots: Int32 = field(default_factory=int32)
    decode_tokens: Int32 = field(default_factory=int32)

    @property
    def num_scheduled_tokens(self) -> int:
        return int(self.prefill_num_tokens.sum()) + len(self.decode_slots)


@dataclass(slots=True, eq=False)
class TokenLogprobs:
    """Log-probabilities of T tokens, each beside the K likeliest at its position.

    They are taken from the model's logits, before temperature, penalties and bias. Ranks count from 1.
    """

    token_ids: Int32  # [T]
    logprobs: Float32  # [T]
    ranks: Int32  # [T]
    top_ids: Int32  # [T, K], likeliest first
    top_logprobs: Float32  # [T, K]


@dataclass(slots=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of the prompt tokens at positions `start`, `start` + 1, ... of one slot."""

    slot: int
    start: int
    scores: TokenLogprobs


@dataclass(slots=True, eq=False)
class StepResult:
    """The answer to one plan, from rank 0: the token sampled for each slot that sampled.

    Slots come in the plan's order, prefill rows first. The log-probabilities are present only where asked for.
    """

    engine_epoch: int
    step: int
    slots: Int32
    tokens: Int32
    logprob_slots: Int32 = field(default_factory=int32)  # those of `slots` that asked; rows of `logprobs`
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
