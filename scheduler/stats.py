"""Counts that an operator watches."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

MAX_NAMED = 1000
"""Preempted requests that are remembered by name until somebody asks."""


@dataclass(slots=True)
class SchedulerStats:
    """Counts since the start, the present load, and who was preempted since the last snapshot."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_sampled_tokens: int = 0
    num_finished: int = 0
    num_preemptions: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    preempted: list[Hashable] = field(default_factory=list)

    def note_preemption(self, request_id: Hashable) -> None:
        self.num_preemptions += 1
        if len(self.preempted) < MAX_NAMED:
            self.preempted.append(request_id)

    def snapshot(self, *, num_running: int, num_waiting: int, num_free_blocks: int) -> SchedulerStats:
        taken = replace(self, num_running=num_running, num_waiting=num_waiting, num_free_blocks=num_free_blocks)
        self.preempted = []
        return taken
