"""The ways of computing a model that `benchmarks.quality` compares: the product's own worker, in each configuration."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.peers.antiphon import PRESET
from cluster.local import LocalEngine
from configs import EngineConfig
from configs.loader import load_config
from configs.model_spec import ModelSpec
from scheduler.output import StepPlan, StepResult
from scheduler.sampling_params import SamplingParams
from workers.attention import AttentionMetadata
from workers.model_runner import PendingStep
from workers.parallel import SingleProcessGroup
from workers.worker import Worker

NUM_SEQS = 8  # decoding together
WAYS: dict[str, tuple[str, ...]] = {
    "pytorch-fp32": ("model.dtype=float32", "worker.cpu_kernels=pytorch"),
    "fp32": ("model.dtype=float32",),
    "bf16": ("model.dtype=bfloat16",),
    "int8": ("model.dtype=bfloat16", "model.quantization=int8"),  # its KV cache and embedding are in bfloat16
    "int8-kv-int8": ("model.dtype=bfloat16", "model.quantization=int8", "cache.dtype=int8"),
    "int4": ("model.dtype=bfloat16", "model.quantization=int4"),
    "int8-kv-fp32": ("model.dtype=float32", "model.quantization=int8"),
}
DEFAULT_WAYS = tuple(WAYS)[:6]


class Candidate:
    """A worker that is asked for logits directly, and for greedy tokens through the engine."""

    def __init__(self, config: EngineConfig, spec: ModelSpec) -> None:
        self._config = config
        self.vocab_size = spec.vocab_size
        self._worker = Worker(config, spec, SingleProcessGroup())
        self._worker.load_model()
        self.num_blocks = self._worker.measure_num_blocks()
        self._worker.allocate_cache(self.num_blocks)
        self._pending: deque[PendingStep | StepResult] = deque()
        self._engine = LocalEngine(config, spec, self)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], first: int) -> Tensor:
        """[T - first, vocabulary], what follows each token from `first` on; valid until the next call.

        All tokens are computed in one prefill step.
        """
        runner, num_tokens, block_size = self._worker.runner, len(token_ids), self._config.cache.block_size
        # Any blocks will do: the engine is idle, and without a prefix cache it expects nothing in them.
        blocks = list(range(-(-num_tokens // block_size)))
        meta = AttentionMetadata.from_lists([num_tokens], [num_tokens], [blocks], block_size=block_size)
        hidden = runner.model(torch.tensor(token_ids), torch.arange(num_tokens), runner.kv, meta)
        return runner.model.compute_logits(hidden[first:])

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        return [completion.token_ids for completion in self._engine.generate(prompts, params)]

    def forced(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[list[int]]:
        """The likeliest token at each place of the answers, where the answer's own tokens come before it."""
        return [
            self.logits([*prompt, *answer[:-1]], len(prompt) - 1).argmax(dim=-1).tolist()
            for prompt, answer in zip(prompts, answers, strict=True)
        ]

    # --- what the engine asks of its ranks: `cluster.local.Executor` ----------------------------------------------

    def submit(self, plan: StepPlan) -> None:
        self._pending.append(self._worker.launch(plan))

    def collect(self) -> StepResult:
        result = self._worker.collect(self._pending.popleft())
        assert result is not None, "a single rank answers"
        return result

    def close(self) -> None:
        self._worker.close()


def load_candidates(directory: Path, ways: Sequence[str], longest: int) -> dict[str, Candidate]:
    """Each of `ways`, with room for `NUM_SEQS` sequences of `longest` tokens.

    Raises:
        ValueError: the model's sequences are shorter, or this machine cannot compute one of the ways.
    """
    spec = ModelSpec.from_directory(directory)
    if longest > spec.max_model_len:
        raise ValueError(f"{longest} tokens are more than the model's {spec.max_model_len}; ask for fewer")
    common = [
        f"model.path={directory}",
        f"model.max_model_len={longest}",
        f"scheduler.max_num_seqs={NUM_SEQS}",
        "cache.enable_prefix_caching=false",
    ]
    blocks = NUM_SEQS * -(-longest // load_config(PRESET).cache.block_size)
    return {
        name: Candidate(load_config(PRESET, [*common, f"cache.num_blocks={blocks}", *WAYS[name]]), spec)
        for name in ways
    }
