"""One rank of a replica: its part of the model, its part of the KV cache, and the steps it computes.

A plain object: tests and `workers.local_executor` make it directly, an actor wraps it. Knows neither the scheduler nor
how plans arrive.
"""

from __future__ import annotations

import logging
import os
from functools import partial

import torch
from torch import Tensor

from configs import EngineConfig
from configs.cache_dtype import refusal
from configs.model_spec import ModelSpec
from configs.sharding import split_heads
from scheduler.output import StepPlan, StepResult
from workers.attention import AttentionMetadata, AttentionNeeds, choose_backend
from workers.compute import choose_compute, choose_sampler
from workers.cpu_decoder import CpuDecoder
from workers.cpu_sampler import CpuSampler
from workers.cuda_graph import CudaCapture, DecodeGraphs
from workers.decode_run import DecodeRun
from workers.gpu_memory import CudaMeter, bytes_left
from workers.input_batch import InputBatch
from workers.kv_cache import KVCache, bytes_per_block, num_blocks_in
from workers.kv_format import torch_dtype
from workers.model_runner import BeginRun, ModelRunner, PendingStep
from workers.models.decoder import CausalLM
from workers.models.registry import build_model
from workers.parallel import ParallelGroup
from workers.sampler import ChooseTokens, DrawnRows, SamplingRows
from workers.sampling_state import SamplingState
from workers.weights import load_weights

log = logging.getLogger(__name__)

SHORT_PROMPTS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Tokens of the prompts that are tried at start: kernels have tiles of their own for few queries."""


def choose_num_threads(config: EngineConfig, num_local_ranks: int) -> int:
    """CPU threads of one rank: as configured, else its share of the cores this process may use."""
    return config.worker.num_threads or max(1, len(os.sched_getaffinity(0)) // num_local_ranks)


def choose_dtype(config: EngineConfig, spec: ModelSpec, device: torch.device) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, config.model.dtype_on(device.type, spec.dtype))
    return dtype


def choose_cache_dtype(config: EngineConfig, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """Of keys and values.

    Raises:
        ValueError: what is configured cannot be held on this device.
    """
    model_dtype = config.model.dtype_on(device.type, spec.dtype)
    dtype = config.cache.dtype_for(model_dtype)
    problem = refusal(dtype, device=device.type, model_dtype=model_dtype, cpu_kernels=config.worker.cpu_kernels)
    if problem is not None:
        raise ValueError(problem)
    return torch_dtype(dtype)


class Worker:
    """In order: `load_model`, `measure_num_blocks`, `allocate_cache` with the smallest number of all ranks, `execute`.

    `num_threads` sets torch's CPU threads for the whole process; None leaves them alone.
    """

    def __init__(
        self, config: EngineConfig, spec: ModelSpec, group: ParallelGroup, *, num_threads: int | None = None
    ) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.num_threads = num_threads
        self.config = config
        self.spec = spec.unquantized() if config.model.load_format == "random" else spec
        self.group = group
        self.device = group.device
        self.dtype = choose_dtype(config, spec, self.device)
        self.cache_dtype = choose_cache_dtype(config, spec, self.device)
        self.shard = split_heads(spec.num_heads, spec.num_kv_heads, group.size)[group.rank]
        self.max_model_len = config.model.max_model_len or spec.max_model_len
        self._model: CausalLM | CpuDecoder | None = None
        self._runner: ModelRunner | None = None
        self._has_graphs = False

    def load_model(self) -> None:
        """Build this rank's part of the model and read its weights.

        Raises:
            ValueError: no attention backend serves it, or the checkpoint does not fit its configuration.
        """
        needs = AttentionNeeds(
            device=self.device,
            dtype=self.dtype,
            head_dim=self.spec.head_dim,
            block_size=self.config.cache.block_size,
            cache_dtype=self.cache_dtype,
            soft_cap=self.spec.attention_soft_cap is not None,
        )
        backend = choose_backend(self.config.worker.attention_backend, needs)
        self._has_graphs = self.device.type == "cuda" and backend.capturable and self.config.worker.cuda_graphs
        model = build_model(self.spec, self.group, backend, self.dtype, self.device)
        load_weights(
            model,
            self.spec,
            load_format=self.config.model.load_format,
            seed=self.config.model.seed,
            kv_scales=self.cache_dtype == torch.float8_e4m3fn,
        )
        num_threads = self.num_threads or torch.get_num_threads()
        self._model = choose_compute(model, self.config, self.spec, self.group, self.dtype, num_threads=num_threads)
        if isinstance(self._model, CpuDecoder) and self.num_threads is not None:
            torch.set_num_threads(1)  # the kernels have their own, and torch's would spin on the same cores

    def measure_num_blocks(self) -> int:
        """KV blocks this rank has room for; all ranks must call it together.

        Raises:
            ValueError: not even one fits.
        """
        assert self._model is not None, "load_model comes first"
        block_bytes = bytes_per_block(
            num_layers=self.spec.num_layers,
            block_size=self.config.cache.block_size,
            num_kv_heads=self.shard.num_kv_heads,
            head_dim=self.spec.head_dim,
            dtype=self.cache_dtype,
        )
        available = None
        if self.device.type == "cuda" and self.config.cache.num_blocks is None:
            available = bytes_left(
                CudaMeter(self.device),
                self.config.cache.gpu_memory_utilization,
                run_largest=self.profile_step,
                make_graphs=self._make_trial_graphs if self._has_graphs else None,
            )
        return num_blocks_in(self.config.cache, block_bytes=block_bytes, available_bytes=available)

    def allocate_cache(self, num_blocks: int) -> None:
        """Make the cache and the batch. May be called again: everything held before is forgotten."""
        assert self._model is not None, "load_model comes first"
        self._runner = None
        num_slots = self.config.scheduler.max_num_seqs
        batch = InputBatch(
            num_slots=num_slots,
            max_model_len=self.max_model_len,
            block_size=self.config.cache.block_size,
            num_blocks=num_blocks,
            vocab_size=self.spec.vocab_size,
            device=self.device,
            dynamic_rope=self.spec.rope.kind == "dynamic",
        )
        sampling = SamplingState(num_slots, self.spec.vocab_size, self.spec.eos_token_ids, self.device)
        kv = self._make_cache(num_blocks)
        graphs = self._capture_graphs(kv)
        choose_tokens = choose_sampler(self._model, self.device)
        if self.device.type == "cuda":
            self.try_kernels(kv, choose_tokens)
        self._runner = ModelRunner(
            self._model,
            kv,
            batch,
            sampling,
            answers=self.group.rank == 0,
            graphs=graphs,
            begin_run=self._decode_runs(batch, kv, choose_tokens),
            choose_tokens=choose_tokens,
        )

    @property
    def runner(self) -> ModelRunner:
        """For callers that launch a step before they collect the last one."""
        assert self._runner is not None, "allocate_cache comes first"
        return self._runner

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Compute one step; only rank 0 has an answer.

        Raises:
            PlanError: the plan is stale, out of order, or contradicts what this rank holds.
            ParallelError: another rank is gone.
        """
        return self.collect(self.launch(plan))

    def launch(self, plan: StepPlan) -> PendingStep | StepResult:
        """Hand one step to the device; a GPU is still at it on return. At most two may be under way.

        Raises: as `execute` does.
        """
        return self.runner.launch(plan)

    def collect(self, pending: PendingStep | StepResult) -> StepResult | None:
        """Wait for the oldest launched step; only rank 0 has an answer."""
        result = self.runner.collect(pending)
        return result if self.group.rank == 0 else None

    def close(self) -> None:
        """Give back model, cache and group."""
        self._runner = None
        self._model = None
        self.group.close()

    def _make_cache(self, num_blocks: int) -> KVCache:
        return KVCache.allocate(
            num_layers=self.spec.num_layers,
            num_blocks=num_blocks,
            block_size=self.config.cache.block_size,
            num_kv_heads=self.shard.num_kv_heads,
            head_dim=self.spec.head_dim,
            dtype=self.cache_dtype,
            device=self.device,
        )

    def _capture_graphs(self, kv: KVCache) -> DecodeGraphs | None:
        if not self._has_graphs:
            return None
        graphs = self._make_graphs(kv)
        graphs.capture()
        return graphs

    def _decode_runs(self, batch: InputBatch, kv: KVCache, choose_tokens: ChooseTokens) -> BeginRun | None:
        if not isinstance(self._model, CpuDecoder) or batch.dynamic_rope:
            return None
        assert isinstance(choose_tokens, CpuSampler)
        return partial(DecodeRun, batch=batch, kv=kv, decoder=self._model, sampler=choose_tokens)

    def _make_graphs(self, kv: KVCache) -> DecodeGraphs:
        assert self._model is not None
        return DecodeGraphs(
            self._model,
            kv,
            max_num_seqs=self.config.scheduler.max_num_seqs,
            max_model_len=self.max_model_len,
            hidden_size=self.spec.hidden_size,
            dtype=self.dtype,
            device=self.device,
            dynamic_rope=self.spec.rope.kind == "dynamic",
            capture=CudaCapture(),
        )

    def _make_trial_graphs(self) -> DecodeGraphs:
        """Over a cache of the dummy block alone: all rows are padding."""
        return self._make_graphs(self._make_cache(0))

    @torch.inference_mode()
    def try_kernels(self, kv: KVCache, choose_tokens: ChooseTokens) -> None:
        """Let everything be compiled that decoding, short prompts and draws need, lest a request wait for it.

        Kernels are compiled at first use, and those for few queries are others than those for many. Works on the dummy
        block of `kv` alone. All ranks must call it together.
        """
        self._compute(kv, [1], [kv.dummy_block], num_decodes=1)
        most = min(self.config.scheduler.max_num_batched_tokens, self.max_model_len)
        for length in (n for n in SHORT_PROMPTS if n <= most):
            blocks = [kv.dummy_block] * -(-length // kv.block_size)
            hidden = self._compute(kv, [length], blocks, num_decodes=0)
        assert self._model is not None
        logits = self._model.compute_logits(hidden[:1])
        tokens = torch.zeros(1, dtype=torch.int64, device=self.device)
        choose_tokens(tokens, logits, SamplingRows(drawn=DrawnRows.alike(1, self.device)))

    @torch.inference_mode()
    def profile_step(self) -> None:
        """Compute the largest steps there can be, over a throw-away cache: one of decode rows, then one of prompts.

        What the first leaves allocated, as a backend's partial results, is there while the second runs.
        """
        assert self._model is not None, "load_model comes first"
        limits, block_size = self.config.scheduler, self.config.cache.block_size
        chunk = min(limits.max_prefill_chunk, limits.max_num_batched_tokens, self.max_model_len)
        lengths = [chunk] * max(1, limits.max_num_batched_tokens // chunk)
        # All sequences write over each other in the same blocks: the numbers do not matter, the sizes do.
        blocks = list(range(-(-chunk // block_size)))
        kv = self._make_cache(len(blocks))
        num_decodes = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        for step_lengths, decodes in (([1] * num_decodes, num_decodes), (lengths, 0)):
            hidden = self._compute(kv, step_lengths, blocks, num_decodes=decodes)
            self._model.compute_logits(hidden[: limits.max_num_seqs])

    def _compute(self, kv: KVCache, lengths: list[int], blocks: list[int], *, num_decodes: int) -> Tensor:
        """A step of sequences that all begin here and lie in the same `blocks`."""
        assert self._model is not None, "load_model comes first"
        meta = AttentionMetadata.from_lists(
            lengths,
            lengths,
            [blocks] * len(lengths),
            block_size=kv.block_size,
            num_decodes=num_decodes,
            device=self.device,
        )
        positions = torch.cat([torch.arange(length, device=self.device) for length in lengths])
        return self._model(torch.zeros_like(positions), positions, kv, meta)
