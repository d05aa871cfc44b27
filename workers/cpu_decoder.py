"""A loaded model moved into the C++ kernels: its weights packed once, a whole step in one call.

A drop-in for `workers.models.decoder.CausalLM` on the CPU, for every architecture there: what a layer holds and the
spec's numbers say what it computes, no architecture is asked for by name. Knows neither plans nor slots, and not how
weights are packed (`workers.packed_model`).
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref, c_float
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from configs.model_spec import ModelSpec
from scheduler.output import Int32
from workers.attention.base import AttentionMetadata
from workers.cpu_packing import WeightFormat, WeightPacker
from workers.cpu_sampler import CpuSampler
from workers.kernels.cpu.library import (
    AllReduce,
    CpuKernels,
    CStep,
    Decoder,
    KvFormat,
    Pool,
    cache_strides,
    check_memory,
)
from workers.kv_cache import KVCache
from workers.models.decoder import CausalLM
from workers.packed_model import PackedModel
from workers.parallel import ParallelGroup
from workers.sampler import SamplingRows
from workers.shared_memory_group import SharedMemoryGroup


@dataclass(frozen=True, slots=True, eq=False)
class StepInMemory:
    """The addresses of a step's tensors, for C++. It may be computed again when other numbers are in them."""

    addresses: CStep
    tensors: list[Tensor]  # which live as long
    hidden: Tensor  # [T, hidden], the result


class CpuDecoder:
    """Takes over `model`: its parameters are emptied as they are packed.

    The results of `__call__` and `compute_logits` are views of buffers that the next call writes.
    """

    def __init__(
        self,
        model: CausalLM,
        spec: ModelSpec,
        group: ParallelGroup,
        kernels: CpuKernels,
        *,
        num_threads: int,
        weight_format: WeightFormat,
        max_num_tokens: int = 0,
    ) -> None:
        self._spec = spec
        self._group = group
        self._kernels = kernels
        self._pool = Pool(kernels, num_threads)
        self._part_sizes = model.lm_head.part_sizes
        self._packed = PackedModel(model, spec, group, WeightPacker(kernels, self._pool, weight_format))
        self._sum_over_ranks()
        self._hidden = torch.empty(0, spec.hidden_size)
        self._logits = torch.empty(0, self._part_sizes[group.rank])
        self._max_num_tokens = max_num_tokens
        self._kv: KVCache | None = None
        self._decoder: Decoder | None = None
        self._error: BaseException | None = None

    @property
    def packed_bytes(self) -> dict[str, int]:
        """Bytes of weights by the format they are kept in."""
        return self._packed.num_bytes

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that a step with logits reads."""
        return self._packed.step_bytes

    def __call__(self, token_ids: Tensor, positions: Tensor, kv: KVCache, meta: AttentionMetadata) -> Tensor:
        """token_ids [T], positions [T] -> [T, hidden]; the step's K/V are in the cache afterwards."""
        return self.compute(self.lay_out(token_ids, positions, kv, meta))

    def lay_out(self, token_ids: Tensor, positions: Tensor, kv: KVCache, meta: AttentionMetadata) -> StepInMemory:
        """A step for `compute` and `decoding`."""
        if kv is not self._kv:
            self._bind(kv)
        if len(token_ids) > len(self._hidden):
            self._hidden = torch.empty(max(len(token_ids), self._max_num_tokens), self._spec.hidden_size)
        return self._point_at(token_ids, positions, meta)

    def compute(self, step: StepInMemory) -> Tensor:
        assert self._decoder is not None, "a step is laid out first"
        self._check(self._kernels.decoder_forward(self._decoder.handle, byref(step.addresses)))
        return step.hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> [R, vocabulary], float32, whole on every rank. All ranks must call it."""
        assert hidden.dtype == torch.float32 and (len(hidden) == 0 or hidden.stride(1) == 1)
        logits = self._room_for_logits(len(hidden))
        assert self._decoder is not None, "a step comes before its logits"
        status = self._kernels.decoder_logits(
            self._decoder.handle, hidden.data_ptr(), hidden.stride(0), len(hidden), logits.data_ptr(), logits.stride(0)
        )
        check_memory(status)
        return self._group.all_gather(logits, self._part_sizes)

    def decoding(
        self, step: StepInMemory, asked: SamplingRows, sampler: CpuSampler, tokens: Tensor, answer: Int32
    ) -> Callable[[], None]:
        """What computes `step`, of which every row samples, and puts the next token of each into `tokens` and `answer`.

        It may be called again when other numbers are in the tensors, until another step is laid out.
        """
        if self._group.size > 1:
            return partial(self._decode_together, step, asked, sampler, tokens, answer)
        assert self._decoder is not None, "a step is laid out first"
        logits = self._room_for_logits(len(tokens))
        call = sampler.lay_out(tokens, logits, asked)
        function, logits_at, answer_at = self._kernels.decode, logits.data_ptr(), answer.ctypes.data
        decoder_handle, sampler_handle = self._decoder.handle, sampler.handle

        def decode() -> None:
            step_at, call_at = byref(step.addresses), byref(call.addresses)
            self._check(function(decoder_handle, step_at, logits_at, sampler_handle, call_at, answer_at))

        return decode

    def make_sampler(self) -> CpuSampler:
        """Chooses tokens on the threads of the decoder, which is not at work meanwhile."""
        return CpuSampler(self._kernels, self._pool, self._spec.vocab_size)

    def _sum_over_ranks(self) -> None:
        """Straight from C++ through shared memory, or by way of Python."""
        description = self._packed.description
        if isinstance(self._group, SharedMemoryGroup):
            description.all_reduce, description.group = self._group.direct_all_reduce
        elif self._group.size > 1:
            self._all_reduce = AllReduce(self._reduce)
            description.all_reduce = self._all_reduce

    def _bind(self, kv: KVCache) -> None:
        """A decoder over this cache; what an earlier one worked in is given back."""
        self._decoder = self._kv = None
        layers, description = self._packed.layers, self._packed.description
        for packed, k, v in zip(layers, kv.k, kv.v, strict=True):
            assert k.dtype == v.dtype and k.stride() == v.stride()
            packed.k_cache, packed.v_cache = k.data_ptr(), v.data_ptr()
            packed.block_stride, packed.token_stride, packed.head_stride = cache_strides(k)
        description.kv_block_size = kv.block_size
        description.kv_format = KvFormat.of(kv.k[0].dtype)
        self._decoder = Decoder(self._kernels, self._pool, description, layers, num_tokens=self._max_num_tokens)
        self._kv = kv

    def _point_at(self, token_ids: Tensor, positions: Tensor, meta: AttentionMetadata) -> StepInMemory:
        step = CStep(num_tokens=len(token_ids), num_seqs=meta.num_seqs)
        step.block_table_stride = meta.block_tables.stride(0) if meta.num_seqs else 0
        keep = [_as(t, torch.int64) for t in (token_ids, positions, meta.slot_mapping)]
        keep += [_as(t, torch.int32) for t in (meta.cu_seqlens_q, meta.seq_lens)]
        assert meta.block_tables.dtype == torch.int32
        keep.append(meta.block_tables)
        step.token_ids, step.positions, step.slots = (t.data_ptr() for t in keep[:3])
        step.first_queries, step.seq_lens, step.block_tables = (t.data_ptr() for t in keep[3:6])
        for i, rope in enumerate(self._packed.ropes):
            if rope is not None:
                cos, sin = (t.contiguous() for t in rope(positions, meta.rope_lens))
                keep += [cos, sin]
                step.cosines[i], step.sines[i] = cos.data_ptr(), sin.data_ptr()
        step.hidden = self._hidden.data_ptr()
        return StepInMemory(step, keep, self._hidden[: len(token_ids)])

    @torch.inference_mode()
    def _decode_together(
        self, step: StepInMemory, asked: SamplingRows, sampler: CpuSampler, tokens: Tensor, answer: Int32
    ) -> None:
        """Each rank has logits of a part of the vocabulary only."""
        sampler(tokens, self.compute_logits(self.compute(step)), asked)
        answer[:] = tokens.numpy()

    def _room_for_logits(self, num_rows: int) -> Tensor:
        if num_rows > len(self._logits):
            self._logits = torch.empty(num_rows, self._logits.shape[1])
        return self._logits[:num_rows]

    def _check(self, status: int) -> None:
        """Memory that is not there ends a step, or a sum over the ranks."""
        if not status:
            return
        check_memory(status)
        if isinstance(self._group, SharedMemoryGroup):
            self._group.check(status, "all_reduce")
        error, self._error = self._error, None
        assert error is not None, f"the decoder stopped with status {status}"
        raise error

    def _reduce(self, _group: int | None, address: int, count: int) -> int:
        """Called from C++ within a step. An exception cannot pass through: it is kept, and the step ends."""
        try:
            values = (c_float * count).from_address(address)
            self._group.all_reduce(torch.frombuffer(values, dtype=torch.float32))
        except BaseException as error:
            self._error = error
            return 1
        return 0


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).contiguous()
