"""Whatever happens in whatever order, every stream gets exactly the tokens of a straight line.

Hypothesis chooses the machine's shape and the events: arrivals with shared prefixes, aborts, tiny caches that preempt,
lost workers, results that come late. `Drive` checks each token, `FakeWorker` each KV entry, `check_integrity` the
books.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
import xxhash
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from configs.schema import CacheConfig, SchedulerConfig
from scheduler.request import QueueFullError, Request
from scheduler.sampling_params import SamplingParams, derive_seed
from tests.support.fake_worker import continuation
from tests.support.scheduler_drive import EOS, VOCAB_SIZE, Drive

MIN_STEPS = 100_000
EXPECTED_EVENTS = (
    "preemptions",
    "copies on write",
    "prefix hits",
    "hits in mid-prompt",
    "re-admissions",
    "mixed steps",
    "tokens unknown to the scheduler",
    "stale tokens",
    "results of an earlier epoch",
    "resets",
    "aborts",
    "aborts of one completion",
    "refusals",
    "full queues",
    "resumed requests",
    "scored prompts",
    "ended by stop",
    "ended by length",
)
DIGESTS = {
    "good": xxhash.xxh3_128_digest,
    "weak": lambda data: xxhash.xxh3_128_digest(data)[:1],
    "constant": lambda data: b"",
}
total: Counter[str] = Counter()


class Traffic:
    """Requests drawn from one seed: families of prompts that share prefixes, follow-ups, forks, odd parameters."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.num_requests = 0

    def request(self, drive: Drive) -> Request:
        r = self.random
        self.num_requests += 1
        params = self._params()
        request = Request(
            request_id=self.num_requests,
            token_ids=self._prompt(drive),
            sampling_params=params,
            priority=r.choice((0, 0, 0, -1, 1)),
            tenant=r.choice("ab"),
            cache_salt=r.choice(("", "", "", "salt")),
        )
        if params.n == 1 and r.random() < 0.1:
            self._resume(request, drive)
        return request

    def _params(self) -> SamplingParams:
        r = self.random
        max_tokens = r.choice((None, 1, 2, r.randint(1, 12), r.randint(1, 40)))
        return SamplingParams(
            n=r.choice((1, 1, 1, 2, 3)),
            seed=r.randrange(100),
            max_tokens=max_tokens,
            min_tokens=r.randint(0, min(max_tokens or 4, 4)),
            stop_token_ids=tuple(r.sample(range(VOCAB_SIZE), r.choice((0, 0, 1, 4)))),
            ignore_eos=r.random() < 0.3,
            logprobs=r.choice((None, None, 1)),
            prompt_logprobs=r.choice((None, None, None, None, 0)),
        )

    def _prompt(self, drive: Drive) -> list[int]:
        r = self.random
        is_next_turn = drive.histories and r.random() < 0.3
        base = r.choice(drive.histories[-8:]) if is_next_turn else [7 * r.randint(1, 2)] * 60
        length = min(len(base), r.randint(0, max(1, drive.max_model_len // 2)))
        return base[:length] + [r.randrange(VOCAB_SIZE) for _ in range(r.choice((0, 1, 3)))]

    def _resume(self, request: Request, drive: Drive) -> None:
        """Give the request some tokens of its own future, as after the loss of an engine."""
        params = request.sampling_params
        prompt = list(request.token_ids)
        if not prompt or len(prompt) >= drive.scheduler.limits.max_num_tokens:
            return
        tokens, _ = continuation(
            prompt,
            params,
            derive_seed(params.seed or 0, 0),
            vocab_size=VOCAB_SIZE,
            eos_token_ids=EOS,
            max_len=drive.scheduler.limits.max_num_tokens,
        )
        request.num_delivered_tokens = self.random.randint(0, len(tokens) - 1)
        request.token_ids = prompt + tokens[: request.num_delivered_tokens]
        drive.events["resumed requests"] += request.num_delivered_tokens > 0


class SchedulerMachine(RuleBasedStateMachine):
    """Single events as rules, and storms of many events, so that deep states are reached and small failures shrink."""

    drive: Drive

    @initialize(
        seed=st.integers(0, 2**32),
        block_size=st.sampled_from((1, 2, 3, 4, 8)),
        num_tokens_cached=st.integers(16, 160),
        max_model_len=st.integers(12, 64),
        max_num_seqs=st.integers(1, 8),
        spare_budget=st.integers(0, 24),
        max_prefill_chunk=st.sampled_from((1, 3, 8, 64)),
        one_step_ahead=st.booleans(),
        policy=st.sampled_from(("fcfs", "priority", "fair")),
        max_preemptions=st.integers(0, 3),
        enable_prefix_caching=st.sampled_from((True, True, True, False)),
        watermark=st.sampled_from((0.0, 0.01, 0.3)),
        digest=st.sampled_from(tuple(DIGESTS)),
    )
    def build(self, seed, block_size, num_tokens_cached, max_model_len, max_num_seqs, spare_budget, **options) -> None:
        digest = DIGESTS[options.pop("digest")]
        caching, watermark = options.pop("enable_prefix_caching"), options.pop("watermark")
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_seqs + spare_budget, max_num_waiting=12, **options
        )
        cache = CacheConfig(block_size=block_size, enable_prefix_caching=caching, watermark=watermark)
        self.drive = Drive(config, cache, max(2, num_tokens_cached // block_size), max_model_len, digest)
        self.traffic = Traffic(seed)

    # --- single events ------------------------------------------------------------------------------------------

    @rule()
    def arrive(self) -> None:
        try:
            self.drive.add(self.traffic.request(self.drive))
        except ValueError:
            self.drive.events["refusals"] += 1
        except QueueFullError:
            self.drive.events["full queues"] += 1

    @precondition(lambda self: self.drive.streams)
    @rule(i=st.integers(0, 1000), alone=st.booleans())
    def abort(self, i: int, alone: bool) -> None:
        request_id, index = list(self.drive.streams)[i % len(self.drive.streams)]
        self.drive.abort(request_id, index if alone else None)

    @rule()
    def schedule(self) -> None:
        self.drive.schedule()

    @rule()
    def collect(self) -> None:
        self.drive.collect()

    @rule()
    def lose_workers(self) -> None:
        self.drive.lose_workers()

    @rule()
    def drain(self) -> None:
        self.drive.drain()

    # --- many ---------------------------------------------------------------------------------------------------

    @rule(seed=st.integers(0, 2**32), arrivals=st.sampled_from((0.05, 0.2, 0.6)), num_events=st.integers(1, 500))
    def storm(self, seed: int, arrivals: float, num_events: int) -> None:
        r = Random(seed)
        for _ in range(num_events):
            if r.random() < arrivals:
                self.arrive()
            if self.drive.streams and r.random() < 0.02:
                self.abort(r.randrange(1000), r.random() < 0.5)
            if r.random() < 0.003:
                self.drive.lose_workers()
            self.drive.step() if r.random() < 0.9 else self.drive.collect()
            self.drive.scheduler.check_integrity()

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "drive"):
            self.drive.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "drive"):
            self.drive.drain()
            total.update(self.drive.events)


@pytest.mark.machine
@pytest.mark.timeout(600)
def test_no_story_loses_repeats_or_changes_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    total.clear()
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=230,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    with capsys.disabled():
        print(f"\nthe scheduler's machine: {total['steps']:,} steps, {total['requests']:,} requests")
    print("\n".join(f"{count:>9,} {name}" for name, count in sorted(total.items())))
    assert total["steps"] >= MIN_STEPS
    assert [name for name in EXPECTED_EVENTS if not total[name]] == []
