"""Token for token what transformers generates, for every architecture and every way of running it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.sampling_params import SamplingParams
from tests.support.parity import SETTINGS, Ranks, Setting, greedy_reference, make_prompts
from tests.support.tiny_models import TINY_MODELS, VOCAB_SIZE, make_tiny_model, save_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT_LENGTHS = (1, 3, 16, 17, 64, 70, 130)
NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)

# Three prompts that fill their first block or nearly so, and a cache that cannot give each of them a second one.
TIGHT_LENGTHS = {16: (14, 15, 16), 64: (62, 63, 64), 256: (250, 253, 256)}
TIGHT_NUM_TOKENS = {16: 20, 64: 6, 256: 10}
TIGHT_NUM_BLOCKS = {16: 5, 64: 4, 256: 4}

# Variants of Llama that differ in positions or biases alone: at TP 2 a sample that has every value of every option.
VARIANTS = ("llama-biases", "llama-linear", "llama-dynamic", "llama-yarn")


class Reference:
    """One architecture: its checkpoint, and transformers' continuations, each computed once."""

    def __init__(self, name, directory):
        self.directory = save_tiny_model(name, directory)
        self.name = name
        self.prompts = make_prompts(PROMPT_LENGTHS, VOCAB_SIZE)
        self.expected = [self.continuation(prompt, NUM_TOKENS) for prompt in self.prompts]

    def continuation(self, prompt, num_tokens):
        # A new model each time: transformers' dynamic rope remembers the longest sequence it has seen.
        return greedy_reference(make_tiny_model(self.name), prompt, num_tokens)


@pytest.fixture(scope="module", params=TINY_MODELS)
def reference(request, tmp_path_factory):
    return Reference(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=[(1, "auto"), (2, "auto"), (1, "pytorch")], ids=["tp1", "tp2", "tp1-pytorch"])
def ranks(reference, request):
    num_ranks, cpu_kernels = request.param
    ranks = Ranks(reference.directory, num_ranks, cpu_kernels=cpu_kernels)
    yield ranks
    ranks.close()


def tokens_of(completions):
    return [completion.token_ids for completion in completions]


def test_every_combination_generates_the_same_tokens(reference, ranks):
    is_variant = reference.name in VARIANTS and ranks.num_ranks > 1
    for setting in SETTINGS[::5] if is_variant else SETTINGS:
        engine = ranks.engine(setting)
        assert tokens_of(engine.generate(reference.prompts, GREEDY)) == reference.expected, setting
        again = engine.generate(reference.prompts[-1:], GREEDY)
        assert tokens_of(again) == reference.expected[-1:], setting
        shares = setting.prefix_cache and ranks.spec.can_share_prefixes(ranks.spec.max_model_len)
        num_cached = 129 // setting.block_size * setting.block_size if shares else 0
        assert again[0].num_cached_tokens == num_cached, setting
        engine.scheduler.check_integrity()


@pytest.mark.parametrize("block_size", TIGHT_LENGTHS)
def test_preempted_sequences_generate_the_same_tokens(reference, ranks, block_size):
    num_tokens = TIGHT_NUM_TOKENS[block_size]
    prompts = make_prompts(TIGHT_LENGTHS[block_size], VOCAB_SIZE, seed=1)
    limit = ranks.spec.max_model_len
    if limit < len(prompts[-1]) + num_tokens:
        pytest.skip(f"the model ends at {limit} tokens")
    expected = [reference.continuation(prompt, num_tokens) for prompt in prompts]
    params = replace(GREEDY, max_tokens=num_tokens)
    tight = Setting(block_size, prefill_chunk=16, num_blocks=TIGHT_NUM_BLOCKS[block_size])
    for prefix_cache in (True, False):
        for one_step_ahead in (True, False):
            setting = replace(tight, prefix_cache=prefix_cache, one_step_ahead=one_step_ahead)
            engine = ranks.engine(setting)
            assert tokens_of(engine.generate(prompts, params)) == expected, setting
            assert engine.scheduler.stats().num_preemptions > 0, setting
            engine.scheduler.check_integrity()
