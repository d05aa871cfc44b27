"""Paged attention by this project's own Triton kernels: every block size, window, soft cap and group of heads.

Prefill rows and decode rows are two launches. The decode rows' work list is made on the device once per step and
window; the buffers of partial results serve all layers. Imports Triton only when it is asked to run.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from workers.attention.base import AttentionBackend, AttentionMetadata, AttentionNeeds, AttentionParams
from workers.attention.reference import ReferenceBackend
from workers.kernels.available import describe, triton_unavailable_reason

if TYPE_CHECKING:
    from workers.kernels.triton.splits import Partials, SplitPlan

FP8 = torch.float8_e4m3fn
SMALLEST_FP8_CAPABILITY = (8, 9)
"""Older devices have no instruction that converts fp8, and Triton none in its place."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MIN_BLOCK_SIZE = 16
PROBE_TOLERANCE = 2e-2
"""Of the probe's relative error: bfloat16 keeps 8 bits."""


class TritonPagedBackend(AttentionBackend):
    """Reads no place of the cache that was not written for the sequence at hand; never waits for the device."""

    name = "triton"
    capturable = True
    cache_dtypes: ClassVar[tuple[torch.dtype, ...]] = (FP8,)

    def __init__(self) -> None:
        self._meta: AttentionMetadata | None = None
        self._plans: dict[tuple[int | None, int], SplitPlan] = {}
        self._partials: Partials | None = None
        self._captured: set[Partials] = set()

    @classmethod
    def unavailable_reason(cls, needs: AttentionNeeds) -> str | None:
        reason = triton_unavailable_reason(needs.device)
        if reason is not None:
            return reason
        if needs.dtype not in DTYPES:
            return f"it has no kernels for {needs.dtype}"
        if not 16 <= needs.head_dim <= 256:
            return f"heads of {needs.head_dim}; it serves 16 to 256"
        if needs.block_size < MIN_BLOCK_SIZE:
            return f"block_size {needs.block_size}; it serves {MIN_BLOCK_SIZE} and more"
        if needs.cache_dtype == FP8 and needs.device.type == "cuda":
            capability = torch.cuda.get_device_capability(needs.device)
            if capability < SMALLEST_FP8_CAPABILITY:
                return "a KV cache in fp8 needs compute capability {}.{}, not {}.{}; leave cache.dtype out".format(
                    *SMALLEST_FP8_CAPABILITY, *capability
                )
        return probe(cls, needs)

    def store_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, params: AttentionParams
    ) -> None:
        from workers.kernels.triton.store import store_kv

        if k.numel():
            store_kv(k, v, k_cache, v_cache, slot_mapping, params)

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if q.numel() and meta.num_prefill_tokens:
            self.prefill(q, k_cache, v_cache, meta, out, params)
        if q.numel() and meta.num_decodes:
            self.decode(q, k_cache, v_cache, meta, out, params)
        return out

    def prefill(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMetadata, out: Tensor, params: AttentionParams
    ) -> None:
        """The prefill rows of q, of which there are some, into those of out."""
        from workers.kernels.triton.prefill import prefill_attention
        from workers.kernels.triton.tuning import device_of

        prefill_attention(q, k_cache, v_cache, meta, out, params, device=device_of(q.device))

    def decode(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMetadata, out: Tensor, params: AttentionParams
    ) -> None:
        """The decode rows of q, of which there are some, into those of out."""
        from workers.kernels.triton.decode import decode_attention
        from workers.kernels.triton.tuning import device_of

        plan = self._plan(meta, params.window, num_kv_heads=k_cache.shape[2])
        partials, device = self._partials_for(plan, q), device_of(q.device)
        decode_attention(q, k_cache, v_cache, meta, out, params, plan=plan, partials=partials, device=device)

    def _plan(self, meta: AttentionMetadata, window: int | None, *, num_kv_heads: int) -> SplitPlan:
        """Made by the first layer that asks: within a graph's capture it becomes part of the graph."""
        from workers.kernels.triton.splits import plan_splits
        from workers.kernels.triton.tuning import device_of

        if self._meta is not meta:
            self._meta, self._plans = meta, {}
        found = self._plans.get((window, num_kv_heads))
        if found is None:
            seq_lens = meta.seq_lens[meta.num_prefill_seqs :]
            found = plan_splits(seq_lens, num_kv_heads=num_kv_heads, window=window, device=device_of(seq_lens.device))
            self._plans[window, num_kv_heads] = found
        return found

    def _partials_for(self, plan: SplitPlan, q: Tensor) -> Partials:
        """Large enough for the largest step so far. What a graph was captured with is kept as long as this backend."""
        from workers.kernels.triton.splits import Partials

        needed, held = plan.items.shape[0], self._partials
        if held is None or held.out.shape[0] < needed or held.out.shape[1:] != q.shape[1:]:
            held = self._partials = Partials.allocate(needed, q.shape[1], q.shape[2], q.device)
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            self._captured.add(held)
        return held


class PairedBackend(TritonPagedBackend):
    """The prefill rows by one backend, the decode rows by another."""

    def __init__(self, prefill: TritonPagedBackend, decode: TritonPagedBackend) -> None:
        super().__init__()
        self.name = f"{prefill.name}+{decode.name}"
        self.prefill = prefill.prefill  # type: ignore[method-assign]
        self.decode = decode.decode  # type: ignore[method-assign]


def probe(backend: type[TritonPagedBackend], needs: AttentionNeeds) -> str | None:
    """Run a small step of both halves on the device; None if it agrees with the PyTorch reference."""
    device, head_dim, block_size = needs.device, needs.head_dim, needs.block_size
    lengths, queries = [block_size + 3, block_size + 1], [5, 1]
    generator = torch.Generator(device=device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=needs.dtype)

    meta = AttentionMetadata.from_lists(
        queries, lengths, [[2, 0], [3, 1]], block_size=block_size, num_decodes=1, device=device
    )
    slots = torch.arange(4 * block_size, device=device)
    k, v, q = randn(len(slots), 2, head_dim), randn(len(slots), 2, head_dim), randn(sum(queries), 4, head_dim)
    params = AttentionParams(scale=1 / math.sqrt(head_dim), soft_cap=30.0 if needs.soft_cap else None)

    def attended(tried: AttentionBackend, q: Tensor) -> Tensor:
        shape, dtype = (-1, block_size, 2, head_dim), needs.cache_dtype or needs.dtype
        k_cache, v_cache = (torch.zeros(x.shape, dtype=dtype, device=device).view(shape) for x in (k, v))
        tried.store_kv(k, v, k_cache, v_cache, slots, params)
        return tried.attend(q, k_cache, v_cache, meta, params).float()

    try:
        found, expected = attended(backend(), q), attended(ReferenceBackend(), q.float())
        error = float((found - expected).norm() / expected.norm())
    except Exception as failure:  # whatever it is, this backend cannot be used
        return f"a trial call failed ({describe(failure)})"
    return None if error < PROBE_TOLERANCE else f"a trial call was off by {error:.1e}"
