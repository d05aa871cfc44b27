"""Step plans by hand, for tests that drive a rank without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.output import AdmittedSequence, StepPlan, int32
from scheduler.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def admitted(
    slot: int,
    token_ids: Sequence[int],
    block_table: Sequence[int],
    *,
    num_cached_tokens: int = 0,
    num_prompt_tokens: int | None = None,
    params: SamplingParams = GREEDY,
    seq_id: int | None = None,
    seed: int = 0,
) -> AdmittedSequence:
    return AdmittedSequence(
        slot=slot,
        seq_id=100 + slot if seq_id is None else seq_id,
        seed=seed,
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        num_cached_tokens=num_cached_tokens,
        token_ids=int32(list(token_ids)),
        block_table=int32(list(block_table)),
        sampling_params=params,
    )


def plan(
    step: int,
    *,
    epoch: int = 0,
    released: Sequence[int] = (),
    admit: Sequence[AdmittedSequence] = (),
    copies: Sequence[tuple[int, int]] = (),
    grown: Sequence[tuple[int, int]] = (),
    prefill: Sequence[tuple[int, int, int]] = (),
    decode: Sequence[tuple[int, int]] = (),
) -> StepPlan:
    """`prefill`: (slot, start, number of tokens); `decode`: (slot, token); `grown`: (slot, block)."""
    return StepPlan(
        engine_epoch=epoch,
        step=step,
        released_slots=int32(list(released)),
        admitted=tuple(admit),
        copied_from=int32([source for source, _ in copies]),
        copied_to=int32([target for _, target in copies]),
        grown_slots=int32([slot for slot, _ in grown]),
        grown_blocks=int32([block for _, block in grown]),
        prefill_slots=int32([slot for slot, _, _ in prefill]),
        prefill_starts=int32([start for _, start, _ in prefill]),
        prefill_num_tokens=int32([count for _, _, count in prefill]),
        decode_slots=int32([slot for slot, _ in decode]),
        decode_tokens=int32([token for _, token in decode]),
    )
