"""Runs of decode steps on a CPU: the same tokens as steps by themselves, and no plan that does not follow."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cluster.local import LocalEngine
from configs import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig, WorkerConfig
from configs.model_spec import ModelSpec
from scheduler.sampling_params import SamplingParams
from tests.support.cpu_kernels import variants_here
from tests.support.step_plans import GREEDY, admitted, plan
from tests.support.thread_executor import ThreadExecutor
from workers.parallel import SingleProcessGroup
from workers.plan_check import PlanError
from workers.worker import Worker

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not variants_here(), reason="no C++ compiler"),
]

BLOCK_SIZE, MAX_MODEL_LEN = 4, 38
ANOTHER_TOKEN = 49  # than those that the sequences below sample
DRAWN = SamplingParams(temperature=1.0, seed=5, ignore_eos=True)


@pytest.fixture
def spec(tiny_checkpoint):
    return ModelSpec.from_directory(tiny_checkpoint("smollm2"))


def make_config(spec, *, num_ranks=1, one_step_ahead=True):
    return EngineConfig(
        model=ModelConfig(path=str(spec.directory), max_model_len=MAX_MODEL_LEN),
        parallel=ParallelConfig(tensor_parallel_size=num_ranks),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=60),
        scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=64, one_step_ahead=one_step_ahead),
        worker=WorkerConfig(num_threads=1),
    )


class CountedWorker(Worker):
    """Counts the steps that are part of a run."""

    num_run_steps = 0

    def launch(self, step_plan):
        launched = super().launch(step_plan)
        run = self.runner._run
        self.num_run_steps += run is not None and len(run._sampled) > 1
        return launched


def make_worker(spec, *, with_runs=True):
    worker = CountedWorker(make_config(spec), spec, SingleProcessGroup())
    worker.load_model()
    worker.allocate_cache(60)
    if not with_runs:
        worker.runner.begin_run = None
    return worker


class Side:
    """A worker that takes plans by hand, one after the other."""

    def __init__(self, spec, *, with_runs=True):
        self.worker = make_worker(spec, with_runs=with_runs)
        self.num_steps = 0

    def step(self, **what):
        result = self.worker.execute(plan(self.num_steps, **what))
        self.num_steps += 1
        return result.tokens.tolist()

    @property
    def num_run_steps(self):
        return self.worker.num_run_steps

    @property
    def facts(self):
        batch = self.worker.runner.batch
        names = ("token_ids", "num_tokens", "num_known", "num_computed", "has_sampled", "num_seq_blocks", "block_table")
        return [getattr(batch.table, name).tolist() for name in names] + [batch.last_tokens.tolist()]


@pytest.fixture
def sides(spec):
    return Side(spec), Side(spec, with_runs=False)


def start(side, *, params=(GREEDY, DRAWN), blocks_each=3):
    """Prompts of 2 and 3 tokens in slots 2 and 0."""
    blocks = [list(range(10 * n, 10 * n + blocks_each)) for n in range(2)]
    admits = [admitted(2, [7, 8], blocks[0], params=params[0]), admitted(0, [4, 5, 6], blocks[1], params=params[1])]
    return side.step(admit=admits, prefill=[(2, 0, 2), (0, 0, 3)])


def decode(side, tokens=(-1, -1), **what):
    return side.step(decode=[(2, tokens[0]), (0, tokens[1])], **what)


def test_a_run_goes_across_blocks_and_grows(sides):
    def drive(side):
        tokens = [start(side)]
        for step in range(15):
            grown = {8: [(0, 30)], 9: [(2, 31)], 12: [(2, 32), (0, 33)]}.get(step, [])
            tokens.append(decode(side, grown=grown))
        return tokens

    in_runs, alone = sides
    assert drive(in_runs) == drive(alone)
    assert (in_runs.num_run_steps, alone.num_run_steps) == (14, 0)


def test_after_a_run_all_is_as_if_there_had_been_none(sides):
    def drive(side):
        tokens = [start(side)]
        tokens += [decode(side) for _ in range(4)]
        tokens.append(decode(side, tokens[-1]))
        admits = [admitted(1, [9, 9, 9], [40, 41])]
        tokens.append(side.step(admit=admits, prefill=[(1, 0, 3)], decode=[(2, -1), (0, tokens[-1][1])]))
        facts = side.facts
        tokens.append(side.step(released=[2], decode=[(0, -1), (1, -1)]))
        tokens.append(side.step(decode=[(0, -1), (1, -1)]))
        return tokens, facts

    in_runs, alone = sides
    assert drive(in_runs) == drive(alone)
    assert in_runs.num_run_steps == 5


def test_plans_that_do_more_than_decode_the_same_rows_are_not_part_of_a_run(sides):
    more = [
        {"admit": [admitted(1, [9, 9, 9, 9, 9], [40, 41])]},
        {"prefill": [(1, 0, 4)]},
        {"copies": [(40, 42)]},
        {"released": [1]},
    ]

    def drive(side):
        tokens = [start(side, blocks_each=6)]
        for what in more:
            tokens += [decode(side), decode(side), decode(side, **what)]
        copied = [bool((layer[40] == layer[42]).all() and layer[42].any()) for layer in side.worker.runner.kv.k]
        return tokens, copied, side.facts

    in_runs, alone = sides
    found = drive(in_runs)
    assert found == drive(alone)
    assert all(found[1])


@pytest.mark.parametrize("one_step_ahead", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_whole_requests_get_the_same_tokens(spec, num_ranks, one_step_ahead):
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6], list(range(20)), [5] * 7]
    params = [
        SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=1, max_tokens=18, ignore_eos=True),
        SamplingParams(temperature=1.2, top_p=0.8, seed=2, max_tokens=11, ignore_eos=True),
        SamplingParams(temperature=1.0, top_k=9, min_p=0.02, seed=3, max_tokens=25, ignore_eos=True),
    ]
    config = make_config(spec, num_ranks=num_ranks, one_step_ahead=one_step_ahead)
    found = []
    for with_runs in (True, False):
        executor = ThreadExecutor(config, spec)
        for worker in executor.workers:
            worker.runner.begin_run = worker.runner.begin_run if with_runs else None
        with LocalEngine(config, spec, executor) as engine:
            found.append([completion.token_ids for completion in engine.generate(prompts, params)])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "asking",
    [
        {"logprobs": 1},
        {"repetition_penalty": 1.3},
        {"logit_bias": {3: 5.0}},
        {"min_tokens": 30},
    ],
)
def test_rows_that_ask_for_more_than_a_token_are_not_left_to_runs(sides, asking):
    def drive(side):
        return [start(side, params=(dataclasses.replace(GREEDY, **asking), GREEDY)), *(decode(side) for _ in range(5))]

    in_runs, alone = sides
    assert drive(in_runs) == drive(alone)
    assert in_runs.num_run_steps == 0


def test_a_run_begins_once_every_row_may_stop(spec):
    side = Side(spec)
    start(side, params=(dataclasses.replace(GREEDY, min_tokens=4), GREEDY))
    for _ in range(8):
        decode(side)
    assert side.num_run_steps == 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"decode": [(2, -1), (0, ANOTHER_TOKEN)]}, "the ranks diverged"),
        ({"decode": [(2, -1), (1, -1)]}, "slot 1 holds no sequence"),
        ({"decode": [(2, -1), (0, -1)], "grown": [(0, 99)]}, "this rank holds 60 blocks"),
        ({"decode": [(2, -1), (0, -1)], "grown": [(1, 5)]}, "grown slot 1 holds no sequence"),
    ],
)
def test_a_plan_that_does_not_follow_from_a_run_is_refused(spec, wrong, message):
    side = Side(spec)
    start(side)
    tokens = [decode(side) for _ in range(3)]
    assert ANOTHER_TOKEN not in tokens[-1]
    with pytest.raises(PlanError, match=message):
        side.step(**wrong)


def test_a_run_needs_room_and_ends_at_the_limit(spec):
    side = Side(spec)
    start(side, blocks_each=2)
    for _ in range(5):
        decode(side)
    with pytest.raises(PlanError, match="no block to store its keys in"):
        decode(side)
    side = Side(spec)
    start(side, blocks_each=10)
    for _ in range(MAX_MODEL_LEN - 3):
        decode(side)
    with pytest.raises(PlanError, match=f"slot 0 would go beyond the limit of {MAX_MODEL_LEN} tokens"):
        decode(side)


def test_a_gap_within_a_run_is_noticed(spec):
    side = Side(spec)
    start(side)
    for _ in range(3):
        decode(side)
    side.num_steps += 1
    with pytest.raises(PlanError, match="step 4 is due"):
        decode(side)


def test_a_result_is_not_changed_by_the_next_step(spec):
    side = Side(spec)
    start(side)
    for _ in range(2):
        decode(side)
    results = [side.worker.execute(plan(step, decode=[(2, -1), (0, -1)])) for step in range(3, 8)]
    kept = [result.tokens.copy() for result in results]
    side.num_steps = 8
    decode(side)
    assert all(np.array_equal(result.tokens, before) for result, before in zip(results, kept, strict=True))
    assert len({tuple(tokens) for tokens in kept}) > 1


def test_a_new_epoch_ends_a_run(spec):
    side = Side(spec)
    start(side)
    for _ in range(3):
        decode(side)
    with pytest.raises(PlanError, match="slot 2 holds no sequence"):
        side.worker.execute(plan(0, epoch=1, decode=[(2, -1), (0, -1)]))
