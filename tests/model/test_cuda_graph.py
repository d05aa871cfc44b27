"""Captured decode steps, with a capture for the CPU that keeps to the rules of a real one."""

from __future__ import annotations

import pytest
import torch

from tests.support.step_plans import admitted, plan
from workers.attention import AttentionMetadata, AttentionParams
from workers.attention.reference import ReferenceBackend
from workers.cuda_graph import DecodeGraphs, bucket_sizes
from workers.input_batch import InputBatch
from workers.kv_cache import KVCache
from workers.model_runner import ModelRunner
from workers.sampling_state import SamplingState

BLOCK_SIZE = 4
NUM_BLOCKS = 12
MAX_MODEL_LEN = 20
HIDDEN = 8


class RecordedCapture:
    """Runs a step when it is captured, as a warm-up does, and again at each replay, and nothing in between."""

    def __init__(self):
        self.num_captured = 0
        self.replayed = []

    def __call__(self, run):
        run()
        number = self.num_captured
        self.num_captured += 1

        def replay():
            self.replayed.append(number)
            run()

        return replay


class OneLayer:
    """Stores a key per token, then attends: the least that a model does with the cache."""

    def __init__(self):
        rng = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(50, HIDDEN, generator=rng)
        self.backend = ReferenceBackend()
        self.seen = []

    def __call__(self, token_ids, positions, kv, meta):
        self.seen.append((len(token_ids), meta))
        x = (self.embedding[token_ids] + positions[:, None]).unsqueeze(1)
        params = AttentionParams(scale=0.1)
        self.backend.store_kv(x, x, kv.k[0], kv.v[0], meta.slot_mapping, params)
        return self.backend.attend(x, kv.k[0], kv.v[0], meta, params).flatten(1)

    def compute_logits(self, hidden):
        return hidden @ self.embedding.T


def make_cache():
    return KVCache.allocate(
        num_layers=1,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_kv_heads=1,
        head_dim=HIDDEN,
        dtype=torch.float32,
        device="cpu",
    )


def make_graphs(model, kv, *, max_num_seqs=6, dynamic_rope=False):
    capture = RecordedCapture()
    graphs = DecodeGraphs(
        model,
        kv,
        max_num_seqs=max_num_seqs,
        max_model_len=MAX_MODEL_LEN,
        hidden_size=HIDDEN,
        dtype=torch.float32,
        device=torch.device("cpu"),
        dynamic_rope=dynamic_rope,
        capture=capture,
    )
    graphs.capture()
    return graphs, capture


def decode_step(lengths, seed=0):
    """Token ids, positions and metadata of sequences of these lengths; sequence i owns blocks 2 i and 2 i + 1."""
    tables = [[2 * i, 2 * i + 1] for i in range(len(lengths))]
    meta = AttentionMetadata.from_lists(
        [1] * len(lengths), lengths, tables, block_size=BLOCK_SIZE, num_decodes=len(lengths)
    )
    token_ids = torch.randint(0, 50, (len(lengths),), generator=torch.Generator().manual_seed(seed))
    return token_ids, torch.tensor(lengths) - 1, meta


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8, 17, 100, 257, 300, 512, 5000])
def test_every_number_of_rows_up_to_the_largest_has_a_graph(max_num_seqs):
    sizes = bucket_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == min(max_num_seqs, 512)
    assert len(sizes) <= 54


def test_replaying_equals_computing_at_once():
    model, eager_cache, graph_cache = OneLayer(), make_cache(), make_cache()
    graphs, _ = make_graphs(model, graph_cache)
    for lengths in ([3, 1, 5], [4], [5, 2, 6, 1, 1, 8], [6, 3]):
        step = decode_step(lengths, seed=sum(lengths))
        expected = model(step[0], step[1], eager_cache, step[2])
        assert torch.equal(graphs.run(*step), expected)
    assert torch.equal(graph_cache.k[0][:NUM_BLOCKS], eager_cache.k[0][:NUM_BLOCKS])


def test_padding_touches_the_dummy_block_alone():
    kv = make_cache()
    graphs, _ = make_graphs(OneLayer(), kv)
    graphs.run(*decode_step([1, 1, 1, 1, 1, 1]))
    before = kv.k[0].clone()
    graphs.run(*decode_step([2, 2, 2, 2, 2]))  # padded to 6: the last row was a sequence's in the step before
    changed = (kv.k[0] != before).flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert [block for block in changed if block != kv.dummy_block] == [0, 2, 4, 6, 8]


def test_capturing_leaves_every_sequence_alone():
    kv = make_cache()
    kv.k[0][:NUM_BLOCKS] = 7.0
    make_graphs(OneLayer(), kv)
    assert (kv.k[0][:NUM_BLOCKS] == 7.0).all()


def test_the_largest_is_captured_first_and_the_smallest_that_fits_is_replayed():
    model = OneLayer()
    graphs, capture = make_graphs(model, make_cache())
    assert [size for size, _ in model.seen] == [6, 4, 2, 1]
    for num_rows in (1, 2, 3, 5, 6):
        graphs.run(*decode_step([1] * num_rows))
    assert capture.replayed == [3, 2, 1, 0, 0]


def test_each_run_gets_metadata_of_its_own():
    model = OneLayer()
    make_graphs(model, make_cache())
    assert len({id(meta) for _, meta in model.seen}) == len(model.seen)


def test_prefills_and_too_many_rows_are_not_served():
    graphs, _ = make_graphs(OneLayer(), make_cache())
    assert graphs.serves(decode_step([1, 2])[2])
    assert not graphs.serves(decode_step([1] * 7)[2])
    mixed = AttentionMetadata.from_lists([2, 1], [2, 1], [[0], [1]], block_size=BLOCK_SIZE, num_decodes=1)
    assert not graphs.serves(mixed)


def test_lengths_for_dynamic_rope_travel_with_the_rows():
    lengths_seen = []

    def model(token_ids, positions, kv, meta):
        lengths_seen.append(meta.rope_lens.tolist())
        return torch.zeros(len(token_ids), HIDDEN)

    graphs, _ = make_graphs(model, make_cache(), max_num_seqs=2, dynamic_rope=True)
    token_ids, positions, meta = decode_step([3, 5])
    object.__setattr__(meta, "rope_lens", torch.tensor([9, 5]))
    graphs.run(token_ids, positions, meta)
    assert lengths_seen[-1] == [9, 5]


def make_runner(*, with_graphs):
    device, model, kv = torch.device("cpu"), OneLayer(), make_cache()
    graphs, capture = make_graphs(model, kv, max_num_seqs=4) if with_graphs else (None, None)
    batch = InputBatch(
        num_slots=4,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        vocab_size=50,
        device=device,
    )
    return ModelRunner(model, kv, batch, SamplingState(4, 50, (), device), graphs=graphs), capture


def run_one_step_ahead(runner):
    """Sequences come and go; each plan is launched before the tokens of the one before are collected."""
    plans = [
        plan(0, admit=[admitted(0, [3, 1, 4], [0, 1, 2]), admitted(2, [5], [3, 4])], prefill=[(0, 0, 3), (2, 0, 1)]),
        plan(1, decode=[(0, -1), (2, -1)]),
        plan(2, admit=[admitted(1, [9, 2], [5, 6])], prefill=[(1, 0, 2)], decode=[(0, -1), (2, -1)]),
        plan(3, decode=[(0, -1), (1, -1), (2, -1)]),
        plan(4, released=[0], decode=[(1, -1), (2, -1)]),
        plan(5, released=[2], decode=[(1, -1)]),
    ]
    pending, tokens = [], []
    for step in plans:
        pending.append(runner.launch(step))
        if len(pending) == 2:
            tokens.append(runner.collect(pending.pop(0)).tokens.tolist())
    return [*tokens, runner.collect(pending.pop()).tokens.tolist()]


def test_one_step_ahead_on_graphs_gives_the_tokens_of_steps_without():
    graphed, capture = make_runner(with_graphs=True)
    eager, _ = make_runner(with_graphs=False)
    assert run_one_step_ahead(graphed) == run_one_step_ahead(eager)
    assert len(capture.replayed) == 4  # the steps without a prompt
