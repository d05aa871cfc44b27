"""Sequences, requests and schedulers in one line each, and a scheduler that is driven step by step."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from configs.schema import CacheConfig, SchedulerConfig
from scheduler.output import StepPlan, StepResult, int32
from scheduler.request import Request, SequenceOutput
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence


def make_sequence(
    num_tokens: int = 8, *, first: int = 0, token_ids: list[int] | None = None, block_size: int = 4, **params: Any
) -> Sequence:
    """A sequence of `num_tokens` tokens that count up from `first`."""
    tokens = list(range(first, first + num_tokens)) if token_ids is None else token_ids
    return Sequence(tokens, SamplingParams(**params), block_size=block_size)


def make_scheduler(
    *,
    num_blocks: int = 32,
    block_size: int = 4,
    max_model_len: int = 64,
    eos_token_ids: tuple[int, ...] = (),
    enable_prefix_caching: bool = True,
    watermark: float = 0.0,
    **config: Any,
) -> Scheduler:
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_prefill_chunk": 32, "one_step_ahead": False}
    return Scheduler(
        SchedulerConfig(**(options | config)),
        CacheConfig(block_size=block_size, enable_prefix_caching=enable_prefix_caching, watermark=watermark),
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        vocab_size=1000,
        eos_token_ids=eos_token_ids,
    )


class Story:
    """A scheduler, told what happens; the worker answers whatever `say` says, 500 by default."""

    def __init__(self, scheduler: Scheduler | None = None, **options: Any) -> None:
        self.scheduler = scheduler or make_scheduler(**options)
        self.plans: list[StepPlan] = []
        self.outputs: dict[tuple[Hashable, int], list[SequenceOutput]] = {}
        self._num_known: dict[int, int] = {}  # tokens, by slot, as the worker has them
        self._sampling: dict[tuple[int, int], list[int]] = {}  # slots, by epoch and step

    def add(self, request_id: Hashable, num_tokens: int = 8, *, first: int = 0, **options: Any) -> None:
        names = ("priority", "tenant", "cache_salt", "num_delivered_tokens")
        about = {name: options.pop(name) for name in names if name in options}
        token_ids = options.pop("token_ids", None) or list(range(first, first + num_tokens))
        params = SamplingParams(**({"max_tokens": 8} | options))
        self.scheduler.add(Request(request_id=request_id, token_ids=token_ids, sampling_params=params, **about))

    def schedule(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if plan is not None:
            self.plans.append(plan)
            self._sampling[plan.engine_epoch, plan.step] = self._follow(plan)
        return plan

    def collect(self, plan: StepPlan, say: int | dict[int, int] = 500, **extra: Any) -> list[SequenceOutput]:
        """Answer `plan`; `say` may give a token for each slot."""
        slots = self._sampling[plan.engine_epoch, plan.step]
        tokens = [say if isinstance(say, int) else say.get(slot, 500) for slot in slots]
        result = StepResult(plan.engine_epoch, plan.step, int32(slots), int32(tokens), **extra)
        outputs = self.scheduler.postprocess(result)
        self.scheduler.check_integrity()
        for output in outputs:
            self.outputs.setdefault((output.request_id, output.index), []).append(output)
        return outputs

    def step(self, say: int | dict[int, int] = 500) -> StepPlan:
        """Schedule and answer at once."""
        plan = self.schedule()
        assert plan is not None, "nothing to do"
        self.collect(plan, say)
        return plan

    def run(self, max_steps: int = 1000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished:
                return
            self.step()
        raise AssertionError(f"unfinished after {max_steps} steps: {self.scheduler.explain_waiting()}")

    def tokens(self, request_id: Hashable, index: int = 0) -> list[int]:
        return [output.token_id for output in self.outputs.get((request_id, index), [])]

    def reason(self, request_id: Hashable, index: int = 0) -> str | None:
        return self.outputs[request_id, index][-1].finish_reason

    def _follow(self, plan: StepPlan) -> list[int]:
        """Do the worker's counting; returns the slots that sample: rows that end their known tokens."""
        self._num_known |= {admitted.slot: len(admitted.token_ids) for admitted in plan.admitted}
        ends = {slot: start + num_tokens for slot, start, num_tokens in prefills(plan)}
        sampling = [slot for slot, end in ends.items() if end == self._num_known[slot]] + plan.decode_slots.tolist()
        for slot in sampling:
            self._num_known[slot] += 1
        return sampling


def prefills(plan: StepPlan) -> list[tuple[int, int, int]]:
    """Slot, first token and number of tokens of each prefill row."""
    columns = plan.prefill_slots.tolist(), plan.prefill_starts.tolist(), plan.prefill_num_tokens.tolist()
    return list(zip(*columns, strict=True))


def decodes(plan: StepPlan) -> list[tuple[int, int]]:
    """Slot and token of each decode row."""
    return list(zip(plan.decode_slots.tolist(), plan.decode_tokens.tolist(), strict=True))


def growth(plan: StepPlan) -> list[tuple[int, int]]:
    """Slot and block of each block that a table gains."""
    return list(zip(plan.grown_slots.tolist(), plan.grown_blocks.tolist(), strict=True))


def copies(plan: StepPlan) -> list[tuple[int, int]]:
    return list(zip(plan.copied_from.tolist(), plan.copied_to.tolist(), strict=True))


def tables(plan: StepPlan) -> dict[int, list[int]]:
    """Block tables of the admitted, by slot."""
    return {admitted.slot: admitted.block_table.tolist() for admitted in plan.admitted}


def everything_is_free(story: Story) -> bool:
    story.scheduler.check_integrity()
    blocks = story.scheduler.blocks
    return not story.scheduler.has_unfinished and blocks.num_free_blocks == blocks.num_blocks
