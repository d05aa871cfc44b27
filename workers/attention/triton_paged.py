"""Paged attention by this project's own Triton kernels: every block size, window, soft cap and group of heads.

Prefill rows and decode rows are two launches. The decode rows' work list is made on the device once per step and
window; the buffers of partial results serve all layers. Imports Triton only when it is asked to run.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workers.attention.base import AttentionBackend, AttentionMetadata, AttentionNeeds
from workers.attention.reference import ReferenceBackend
from workers.kernels.available import describe, triton_unavailable_reason

if TYPE_CHECKING:
    from workers.kernels.triton.decode import Partials, SplitPlan

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MIN_BLOCK_SIZE = 16
PROBE_TOLERANCE = 2e-2
"""Of the probe's relative error: bfloat16 keeps 8 bits."""


class TritonPagedBackend(AttentionBackend):
    """Reads no place of the cache that was not written for the sequence at hand; never waits for the device."""

    name = "triton"
    capturable = True

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
        return probe(cls, needs)

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        from workers.kernels.triton.store import store_kv

        if k.numel():
            store_kv(k, v, k_cache, v_cache, slot_mapping)

    def attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if q.numel():
            self.prefill(q, k_cache, v_cache, meta, out, scale=scale, window=window, soft_cap=soft_cap)
            self.decode(q, k_cache, v_cache, meta, out, scale=scale, window=window, soft_cap=soft_cap)
        return out

    def prefill(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: AttentionMetadata,
        out: Tensor,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> None:
        """The prefill rows of q into those of out."""
        from workers.kernels.triton.prefill import prefill_attention
        from workers.kernels.triton.tuning import device_of

        num_seqs, num_tokens = meta.num_prefill_seqs, meta.num_prefill_tokens
        if not num_tokens:
            return
        prefill_attention(
            q[:num_tokens],
            k_cache,
            v_cache,
            out[:num_tokens],
            cu_seqlens_q=meta.cu_seqlens_q[: num_seqs + 1],
            seq_lens=meta.seq_lens[:num_seqs],
            block_tables=meta.block_tables[:num_seqs],
            max_seqlen_q=meta.max_seqlen_q,
            window=window,
            device=device_of(q.device),
            scale=scale,
            soft_cap=soft_cap,
        )

    def decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: AttentionMetadata,
        out: Tensor,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> None:
        """The decode rows of q into those of out."""
        from workers.kernels.triton.decode import decode_attention
        from workers.kernels.triton.tuning import device_of

        if not meta.num_decodes:
            return
        plan = self._plan(meta, window, num_kv_heads=k_cache.shape[2])
        decode_attention(
            q[meta.num_prefill_tokens :],
            k_cache,
            v_cache,
            out[meta.num_prefill_tokens :],
            seq_lens=meta.seq_lens[meta.num_prefill_seqs :],
            block_tables=meta.block_tables[meta.num_prefill_seqs :],
            plan=plan,
            partials=self._partials_for(plan, q),
            device=device_of(q.device),
            scale=scale,
            soft_cap=soft_cap,
        )

    def _plan(self, meta: AttentionMetadata, window: int | None, *, num_kv_heads: int) -> SplitPlan:
        """Made by the first layer that asks: within a graph's capture it becomes part of the graph."""
        from workers.kernels.triton.decode import plan_splits
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
        from workers.kernels.triton.decode import Partials

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
    device, dtype, head_dim, block_size = needs.device, needs.dtype, needs.head_dim, needs.block_size
    num_blocks, lengths, queries = 4, [block_size + 3, block_size + 1], [5, 1]
    generator = torch.Generator(device=device).manual_seed(0)
    shape = (num_blocks, block_size, 2, head_dim)
    k_cache, v_cache = (torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(2))
    q = torch.randn(sum(queries), 4, head_dim, generator=generator, device=device, dtype=dtype)
    meta = AttentionMetadata.from_lists(
        queries, lengths, [[2, 0], [3, 1]], block_size=block_size, num_decodes=1, device=device
    )
    cap = 30.0 if needs.soft_cap else None
    scale = 1 / math.sqrt(head_dim)
    try:
        out = backend().attend(q, k_cache, v_cache, meta, scale=scale, soft_cap=cap).float()
        expected = ReferenceBackend().attend(
            q.float(), k_cache.float(), v_cache.float(), meta, scale=scale, soft_cap=cap
        )
        error = float((out - expected).norm() / expected.norm())
    except Exception as failure:  # whatever it is, this backend cannot be used
        return f"a trial call failed ({describe(failure)})"
    return None if error < PROBE_TOLERANCE else f"a trial call was off by {error:.1e}"
