"""A scheduler and a fake worker driven together, every token of every stream checked against the oracle."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import xxhash

from configs.schema import CacheConfig, SchedulerConfig
from scheduler.output import StepPlan, StepResult, TokenLogprobs
from scheduler.prefix_cache import PrefixCache
from scheduler.request import Request, SequenceOutput
from scheduler.sampling_params import derive_seed
from scheduler.scheduler import Scheduler
from tests.support.fake_worker import FakeWorker, continuation, prefix_hashes, score

VOCAB_SIZE = 40
EOS = (0,)


@dataclass
class Stream:
    """What the client of one sequence has, beside what it must get."""

    prompt: list[int]
    token_ids: list[int]
    finish_reason: str
    prefixes: list[int]  # hash before each of `token_ids`
    wants_logprobs: bool
    wants_prompt_logprobs: bool
    num_received: int = 0


@dataclass
class Drive:
    """One engine loop without an engine. `events` counts what happened on the way."""

    config: SchedulerConfig
    cache: CacheConfig
    num_blocks: int
    max_model_len: int
    digest: Callable[[bytes], bytes] = xxhash.xxh3_128_digest
    events: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            self.config,
            self.cache,
            num_blocks=self.num_blocks,
            max_model_len=self.max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=EOS,
        )
        self.scheduler.blocks.prefix_cache = PrefixCache(self.num_blocks, digest=self.digest)
        self.worker = FakeWorker(
            num_blocks=self.num_blocks,
            block_size=self.cache.block_size,
            vocab_size=VOCAB_SIZE,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            eos_token_ids=EOS,
            events=self.events,
        )
        self.streams: dict[tuple[Hashable, int], Stream] = {}
        self.histories: list[list[int]] = []  # finished prompts and completions, for follow-up prompts
        self.results: deque[StepResult] = deque()
        self.epoch = 0

    # --- what may happen ----------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        params = request.sampling_params
        prompt, known = list(request.token_ids), request.num_delivered_tokens
        base, delivered = prompt[: len(prompt) - known], prompt[len(prompt) - known :]
        for index in range(params.n):
            tokens, reason = continuation(
                base,
                params,
                derive_seed(params.seed, index),
                vocab_size=VOCAB_SIZE,
                eos_token_ids=EOS,
                max_len=self.scheduler.limits.max_num_tokens,
            )
            assert tokens[:known] == delivered, "a resumed request continues its own stream"
            prefixes = prefix_hashes(base + tokens)[len(base) - 1 :]
            self.streams[request.request_id, index] = Stream(
                prompt=base,
                token_ids=tokens,
                finish_reason=reason,
                prefixes=prefixes,
                wants_logprobs=params.logprobs is not None,
                wants_prompt_logprobs=params.prompt_logprobs is not None and index == 0,
                num_received=known,
            )
        self.events["requests"] += 1

    def abort(self, request_id: Hashable, index: int | None = None) -> None:
        """The whole request, or completion `index` of it alone."""
        self.scheduler.abort(request_id, index)
        for key in [key for key in self.streams if key[0] == request_id and index in (None, key[1])]:
            del self.streams[key]
            self.events["aborts" if index is None else "aborts of one completion"] += 1

    def schedule(self) -> StepPlan | None:
        """Send the next plan, if the scheduler may send one; its result is held back."""
        if self.scheduler.num_steps_in_flight == self.scheduler.max_steps_in_flight:
            return None
        num_preemptions = self.scheduler.stats().num_preemptions
        plan = self.scheduler.schedule()
        self.events["preemptions"] += self.scheduler.stats().num_preemptions - num_preemptions
        if plan is None:
            assert self.scheduler.num_steps_in_flight or not self.scheduler.has_unfinished, (
                "work exists, and nothing moves"
            )
        else:
            self.events["steps"] += 1
            self.events["mixed steps"] += bool(len(plan.prefill_slots) and len(plan.decode_slots))
            self.results.append(self.worker.execute(plan))
        return plan

    def collect(self) -> list[SequenceOutput]:
        """Let the oldest result arrive."""
        if not self.results:
            return []
        result = self.results.popleft()
        is_void = result.engine_epoch != self.epoch
        outputs = self.scheduler.postprocess(result)
        assert not (is_void and outputs), "a result of an earlier epoch is dropped"
        self.events["results of an earlier epoch"] += is_void
        self.events["stale tokens"] += 0 if is_void else len(result.slots) - len(outputs)
        for output in outputs:
            self._receive(output)
        return outputs

    def step(self) -> StepPlan | None:
        """One turn of the engine loop: schedule, and collect unless a step ahead may be sent first."""
        plan = self.schedule()
        if plan is None or self.scheduler.num_steps_in_flight == self.scheduler.max_steps_in_flight:
            self.collect()
        return plan

    def lose_workers(self) -> None:
        """All KV is gone; results on their way may still arrive, and mean nothing."""
        self.epoch += 1
        self.scheduler.reset_workers(self.epoch)
        self.worker.restart(self.epoch)
        self.events["resets"] += 1

    def drain(self) -> None:
        """Everything that is promised arrives, in a bounded number of steps, and every block comes home."""
        owed = sum(len(s.prompt) + len(s.token_ids) for s in self.streams.values())
        for _ in range(100 + 20 * owed):
            if not self.scheduler.has_unfinished and not self.results:
                break
            self.step()
        assert not self.scheduler.has_unfinished, f"stuck: {self.scheduler.explain_waiting()}"
        assert not self.streams, "a stream ended without its end"
        self.scheduler.check_integrity()
        assert self.scheduler.blocks.num_free_blocks == self.num_blocks

    # --- what must arrive ---------------------------------------------------------------------------------------

    def _receive(self, output: SequenceOutput) -> None:
        key = output.request_id, output.index
        stream = self.streams[key]
        i = stream.num_received
        assert output.token_id == stream.token_ids[i], f"token {i} of {key}: a stream never changes"
        stream.num_received += 1
        is_last = stream.num_received == len(stream.token_ids)
        assert output.finish_reason == (stream.finish_reason if is_last else None)
        assert 0 <= output.num_cached_tokens <= len(stream.prompt)
        if stream.wants_logprobs:
            assert output.logprobs is not None
            self._check_scores(output.logprobs, [output.token_id], [stream.prefixes[i]])
        if stream.wants_prompt_logprobs:
            assert output.prompt_logprobs is not None
            self._check_scores(output.prompt_logprobs, stream.prompt[1:], prefix_hashes(stream.prompt)[:-1])
            stream.wants_prompt_logprobs = False
            self.events["scored prompts"] += 1
        else:
            assert output.prompt_logprobs is None
        if is_last:
            self.histories.append(stream.prompt + stream.token_ids)
            del self.streams[key]
            self.events[f"ended by {output.finish_reason}"] += 1

    @staticmethod
    def _check_scores(scores: TokenLogprobs, token_ids: list[int], prefixes: list[int]) -> None:
        assert scores.token_ids.tolist() == token_ids
        assert scores.logprobs.tolist() == [score(p, t) for p, t in zip(prefixes, token_ids, strict=True)]
