"""A worker without a model: it executes plans to the letter and knows what every KV entry ought to be.

The KV of a token depends on all tokens before it, so an entry is modelled as the hash of its whole prefix. Each
computed row checks every position it attends to: a block reused too early, shared or copied wrongly is seen at once.
The next token is a pure function of the prefix and the seed, so `continuation` tells what a sequence must become,
whatever happens to it on the way.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from scheduler.output import UNKNOWN_TOKEN, AdmittedSequence, PromptLogprobs, StepPlan, StepResult, TokenLogprobs, int32
from scheduler.sampling_params import SamplingParams

ROOT = 0x5EED


def extend(prefix: int, token_id: int) -> int:
    """The hash of a prefix, one token longer."""
    return hash((prefix, token_id))


def prefix_hashes(token_ids: list[int], prefix: int = ROOT) -> list[int]:
    hashes = []
    for token_id in token_ids:
        prefix = extend(prefix, token_id)
        hashes.append(prefix)
    return hashes


def sample(prefix: int, seed: int, vocab_size: int, masked: frozenset[int] = frozenset()) -> int:
    """The next token, a pure function of everything before it, and never a masked one."""
    token_id = hash((prefix, seed, 1)) % vocab_size
    while token_id in masked:
        token_id = (token_id + 1) % vocab_size
    return token_id


def score(prefix: int, token_id: int) -> float:
    """What this model pretends to be the log-probability of a token after a prefix."""
    return -float(hash((prefix, token_id, 2)) % 1000)


def stop_ids_of(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
    return frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_token_ids)


def continuation(
    prompt: list[int],
    params: SamplingParams,
    seed: int,
    *,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    max_len: int,
) -> tuple[list[int], str]:
    """The oracle: tokens and finish reason of one sequence, computed in a straight line."""
    prefix = prefix_hashes(prompt)[-1]
    limit = max_len - len(prompt) if params.max_tokens is None else params.max_tokens
    stops = stop_ids_of(params, eos_token_ids)
    tokens: list[int] = []
    while len(tokens) < limit:
        token_id = sample(prefix, seed, vocab_size, stops if len(tokens) < params.min_tokens else frozenset())
        tokens.append(token_id)
        if token_id in stops:
            return tokens, "stop"
        prefix = extend(prefix, token_id)
    return tokens, "length"


def scores_of(token_ids: list[int], prefixes: list[int]) -> TokenLogprobs:
    """Rows for `token_ids`, each after the prefix beside it."""
    values = np.array([score(prefix, t) for prefix, t in zip(prefixes, token_ids, strict=True)], np.float32)
    column = int32(token_ids).reshape(-1, 1)
    return TokenLogprobs(int32(token_ids), values, np.ones(len(token_ids), np.int32), column, values.reshape(-1, 1))


@dataclass
class Slot:
    """One row of the persistent batch."""

    seed: int
    num_prompt_tokens: int
    num_computed: int
    hashes: list[int]  # one per known token
    token_ids: list[int]
    table: list[int]
    params: SamplingParams
    sampled: int | None = None  # by the step before, and not yet part of `token_ids`


@dataclass
class FakeWorker:
    """KV contents of `num_blocks` blocks, the slots over them, and the promises of the step contract as assertions."""

    num_blocks: int
    block_size: int
    vocab_size: int
    max_num_batched_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    engine_epoch: int = 0
    next_step: int = 0
    slots: dict[int, Slot] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.kv: list[list[int | None]] = [[None] * self.block_size for _ in range(self.num_blocks)]

    def restart(self, engine_epoch: int) -> None:
        """A new worker group: no KV, no slots."""
        self.engine_epoch, self.next_step = engine_epoch, 0
        self.slots.clear()
        self.__post_init__()

    def execute(self, plan: StepPlan) -> StepResult:
        assert (plan.engine_epoch, plan.step) == (self.engine_epoch, self.next_step), "plans come without gaps"
        assert plan.num_scheduled_tokens <= self.max_num_batched_tokens, "the token budget holds"
        self.next_step += 1
        self._apply_differences(plan)
        sampling = self._store_prefills(plan) + self._store_decodes(plan)
        for slot_id in (*plan.prefill_slots.tolist(), *plan.decode_slots.tolist()):
            self._check_attended(slot_id, self.slots[slot_id])
        return self._answer(plan, sampling)

    # --- differences --------------------------------------------------------------------------------------------

    def _apply_differences(self, plan: StepPlan) -> None:
        for slot_id in plan.released_slots.tolist():
            del self.slots[slot_id]
        for admitted in plan.admitted:
            assert admitted.slot not in self.slots, f"slot {admitted.slot} was not released"
            self.slots[admitted.slot] = self._admit(admitted)
        for slot_id, block_id in zip(plan.grown_slots.tolist(), plan.grown_blocks.tolist(), strict=True):
            self.slots[slot_id].table.append(block_id)
        for source, target in zip(plan.copied_from.tolist(), plan.copied_to.tolist(), strict=True):
            self.kv[target] = list(self.kv[source])
            self.events["copies on write"] += 1

    def _admit(self, admitted: AdmittedSequence) -> Slot:
        token_ids = admitted.token_ids.tolist()
        self.events["prefix hits"] += admitted.num_cached_tokens > 0
        self.events["re-admissions"] += len(token_ids) > admitted.num_prompt_tokens
        return Slot(
            seed=admitted.seed,
            num_prompt_tokens=admitted.num_prompt_tokens,
            num_computed=admitted.num_cached_tokens,
            hashes=prefix_hashes(token_ids),
            token_ids=token_ids,
            table=admitted.block_table.tolist(),
            params=admitted.sampling_params,
        )

    # --- computing ----------------------------------------------------------------------------------------------

    def _store_prefills(self, plan: StepPlan) -> list[int]:
        sampling = []
        rows = zip(
            plan.prefill_slots.tolist(), plan.prefill_starts.tolist(), plan.prefill_num_tokens.tolist(), strict=True
        )
        for slot_id, start, num_tokens in rows:
            slot = self.slots[slot_id]
            assert num_tokens > 0, "an empty row"
            assert start >= slot.num_computed, f"slot {slot_id} computes token {start} again"
            self.events["hits in mid-prompt"] += start > slot.num_computed
            self._store(slot, start, start + num_tokens)
            if slot.num_computed == len(slot.token_ids):
                sampling.append(slot_id)
        return sampling

    def _store_decodes(self, plan: StepPlan) -> list[int]:
        for slot_id, token_id in zip(plan.decode_slots.tolist(), plan.decode_tokens.tolist(), strict=True):
            slot = self.slots[slot_id]
            assert slot.sampled is not None, f"slot {slot_id} decodes before its prompt is computed"
            assert token_id in (UNKNOWN_TOKEN, slot.sampled), f"slot {slot_id} sampled {slot.sampled}, not {token_id}"
            self.events["tokens unknown to the scheduler"] += token_id == UNKNOWN_TOKEN
            slot.hashes.append(extend(slot.hashes[-1], slot.sampled))
            slot.token_ids.append(slot.sampled)
            self._store(slot, len(slot.token_ids) - 1, len(slot.token_ids))
        return plan.decode_slots.tolist()

    def _store(self, slot: Slot, start: int, end: int) -> None:
        assert end <= len(slot.token_ids), f"tokens {start} to {end} of {len(slot.token_ids)}"
        assert end <= len(slot.table) * self.block_size, f"token {end - 1} has no block in {slot.table}"
        for position in range(start, end):
            self.kv[slot.table[position // self.block_size]][position % self.block_size] = slot.hashes[position]
        slot.num_computed = end

    def _check_attended(self, slot_id: int, slot: Slot) -> None:
        size = self.block_size
        for i, block_id in enumerate(slot.table):
            expected = slot.hashes[i * size : min((i + 1) * size, slot.num_computed)]
            found = self.kv[block_id][: len(expected)]
            assert found == expected, (
                f"slot {slot_id}: block {block_id}, number {i} of {slot.table}, holds another prefix"
            )

    # --- answering ----------------------------------------------------------------------------------------------

    def _answer(self, plan: StepPlan, sampling: list[int]) -> StepResult:
        result = StepResult(plan.engine_epoch, plan.step, int32(sampling), int32([self._sample(s) for s in sampling]))
        scored = [slot_id for slot_id in sampling if self.slots[slot_id].params.logprobs is not None]
        if scored:
            result.logprob_slots = int32(scored)
            slots = [self.slots[slot_id] for slot_id in scored]
            result.logprobs = scores_of([slot.sampled for slot in slots], [slot.hashes[-1] for slot in slots])
        result.prompt_logprobs = tuple(self._score_prompts(plan))
        return result

    def _sample(self, slot_id: int) -> int:
        slot = self.slots[slot_id]
        num_completion_tokens = len(slot.token_ids) - slot.num_prompt_tokens
        stops = stop_ids_of(slot.params, self.eos_token_ids)
        masked = stops if num_completion_tokens < slot.params.min_tokens else frozenset()
        slot.sampled = sample(slot.hashes[-1], slot.seed, self.vocab_size, masked)
        return slot.sampled

    def _score_prompts(self, plan: StepPlan) -> list[PromptLogprobs]:
        chunks = []
        rows = zip(
            plan.prefill_slots.tolist(), plan.prefill_starts.tolist(), plan.prefill_num_tokens.tolist(), strict=True
        )
        for slot_id, start, num_tokens in rows:
            slot = self.slots[slot_id]
            end = min(start + num_tokens, slot.num_prompt_tokens - 1)
            if slot.params.prompt_logprobs is not None and start < end:
                scores = scores_of(slot.token_ids[start + 1 : end + 1], slot.hashes[start:end])
                chunks.append(PromptLogprobs(slot_id, start + 1, scores))
        return chunks
