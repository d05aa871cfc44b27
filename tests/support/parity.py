"""Greedy continuations by transformers, and engines of every configuration to compare with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from cluster.local import LocalEngine
from configs import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig, WorkerConfig
from configs.model_spec import ModelSpec
from tests.support.thread_executor import ThreadExecutor

EngineT = TypeVar("EngineT", bound=LocalEngine)


@dataclass(frozen=True, slots=True)
class Setting:
    """One combination; the sizes of a step are small, so that tiny prompts need several."""

    block_size: int = 16
    prefill_chunk: int = 512
    prefix_cache: bool = True
    one_step_ahead: bool = True
    num_blocks: int | None = None
    max_num_seqs: int = 8
    cpu_kernels: str = "auto"

    def config(self, directory: Path, num_ranks: int) -> EngineConfig:
        return EngineConfig(
            model=ModelConfig(path=str(directory)),
            parallel=ParallelConfig(tensor_parallel_size=num_ranks),
            cache=CacheConfig(
                block_size=self.block_size,
                num_blocks=self.num_blocks or 1024 // self.block_size + 8,
                enable_prefix_caching=self.prefix_cache,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=512,
                max_prefill_chunk=self.prefill_chunk,
                one_step_ahead=self.one_step_ahead,
            ),
            worker=WorkerConfig(cpu_kernels=self.cpu_kernels),
        )


SETTINGS = [
    Setting(block_size, prefill_chunk, prefix_cache, one_step_ahead)
    for block_size, prefill_chunk, prefix_cache, one_step_ahead in product(
        (16, 64, 256), (16, 512), (True, False), (True, False)
    )
]


def make_prompts(lengths: Sequence[int], vocab_size: int, *, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def greedy_reference(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """What transformers' own `generate` continues `prompt` with."""
    token_ids = torch.tensor([prompt])
    out = model.generate(
        token_ids,
        attention_mask=torch.ones_like(token_ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


class Ranks:
    """The weights of one model on some ranks, loaded once and used by many engines, each with a new poisoned cache."""

    def __init__(self, directory: Path, num_ranks: int, *, cpu_kernels: str = "auto") -> None:
        self.spec = ModelSpec.from_directory(directory)
        self.num_ranks = num_ranks
        self._executor = ThreadExecutor(Setting(cpu_kernels=cpu_kernels).config(directory, num_ranks), self.spec)

    def engine(self, setting: Setting, engine_type: type[EngineT] = LocalEngine) -> EngineT:
        """The engine must be done before the next one is made."""
        config = setting.config(self.spec.directory, self.num_ranks)
        self._executor.allocate(config)
        for worker in self._executor.workers:
            for cache in (*worker.runner.kv.k, *worker.runner.kv.v):
                cache.fill_(torch.nan)  # whatever is read before it was written shows
        return engine_type(config, self.spec, self._executor)

    def close(self) -> None:
        self._executor.close()
