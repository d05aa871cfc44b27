"""The demo's model, for real: a sample of what `benchmarks/parity.py` compares in full."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from benchmarks.prompts import make_prompts
from scheduler.sampling_params import SamplingParams
from tests.support.parity import Ranks, Setting, greedy_reference
from workers.prepare import prepare_model

GGUF = Path(__file__).parents[2] / "models" / "smollm2-135m-instruct.gguf"
LENGTHS = (1, 10, 26, 42, 70)
NUM_TOKENS = 8

pytestmark = pytest.mark.skipif(not GGUF.is_file(), reason="`make model` obtains the model")


@pytest.fixture(scope="module")
def directory():
    return prepare_model(str(GGUF))


@pytest.fixture(scope="module")
def prompts(directory):
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return make_prompts(lambda text: list(tokenizer.encode(text).ids), LENGTHS)


@pytest.fixture(scope="module")
def expected(directory, prompts):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return [greedy_reference(model, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_tokens_are_those_of_transformers(directory, prompts, expected, num_ranks):
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    ranks = Ranks(directory, num_ranks)
    settings = [
        Setting(block_size=256, prefill_chunk=512),
        Setting(block_size=16, prefill_chunk=48, num_blocks=13),  # preempts
    ]
    for setting in settings:
        engine = ranks.engine(setting)
        assert [c.token_ids for c in engine.generate(prompts, params)] == expected, setting
    assert engine.scheduler.stats().num_preemptions > 0
    ranks.close()
