"""The engine without a cluster: scheduler and ranks driven from one thread, token ids in, token ids out.

For tests, benchmarks and debugging; a deployment adds the transport and the clients. Knows neither Ray nor text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from configs import EngineConfig
from configs.model_spec import ModelSpec
from scheduler.output import StepPlan, StepResult, TokenLogprobs
from scheduler.request import FinishReason, Request, SequenceOutput
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler


class Executor(Protocol):
    """The ranks of one replica; see `workers.local_executor.LocalExecutor`."""

    num_blocks: int

    def submit(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Completion:
    """One continuation of one prompt."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one row per token, where asked for
    prompt_logprobs: TokenLogprobs | None = None

    def add(self, output: SequenceOutput) -> None:
        self.token_ids.append(output.token_id)
        self.finish_reason = output.finish_reason
        self.num_cached_tokens = output.num_cached_tokens
        if output.logprobs is not None:
            self.logprobs.append(output.logprobs)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs


class LocalEngine:
    """A whole replica in this process, and its ranks in others if there is more than one.

    An `executor` of the caller's is used instead of a `LocalExecutor`, and closed with the engine. It may have served
    another engine before, if that one had a lower `engine_epoch` and nothing in flight.
    """

    def __init__(
        self, config: EngineConfig, spec: ModelSpec, executor: Executor | None = None, *, engine_epoch: int = 0
    ) -> None:
        if executor is None:
            from workers.local_executor import LocalExecutor

            executor = LocalExecutor(config, spec)
        self.executor = executor
        max_model_len = config.model.max_model_len or spec.max_model_len
        self.scheduler = Scheduler(
            config.scheduler,
            spec.cache_config(config.cache, max_model_len),
            num_blocks=executor.num_blocks,
            max_model_len=max_model_len,
            vocab_size=spec.vocab_size,
            eos_token_ids=spec.eos_token_ids,
            engine_epoch=engine_epoch,
        )
        self._num_requests = 0

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]:
        """Continue every prompt; for each its `n` completions, in order.

        Raises:
            ValueError: a prompt can never be served.
            RankFailedError: a rank failed.
        """
        asked = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        completions: dict[tuple[int, int], Completion] = {}
        for prompt, own_params in zip(prompts, asked, strict=True):
            request_id, self._num_requests = self._num_requests, self._num_requests + 1
            self.scheduler.add(Request(request_id=request_id, token_ids=prompt, sampling_params=own_params))
            completions.update({(request_id, index): Completion() for index in range(own_params.n)})
        while self.scheduler.has_unfinished:
            for output in self.step():
                completions[output.request_id, output.index].add(output)  # type: ignore[index]
        self._settle()
        return list(completions.values())

    def step(self) -> list[SequenceOutput]:
        """Keep the ranks busy and take the oldest step's tokens."""
        scheduler = self.scheduler
        while scheduler.num_steps_in_flight < scheduler.max_steps_in_flight:
            plan = scheduler.schedule()
            if plan is None:
                break
            self.executor.submit(plan)
        if not scheduler.num_steps_in_flight:
            raise RuntimeError(f"nothing can be computed: {'; '.join(scheduler.explain_waiting())}")
        return scheduler.postprocess(self.executor.collect())

    def close(self) -> None:
        self.executor.close()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _settle(self) -> None:
        """Steps that ran ahead of the last token still answer; nothing may be left in flight between two calls."""
        while self.scheduler.num_steps_in_flight:
            self.scheduler.postprocess(self.executor.collect())
