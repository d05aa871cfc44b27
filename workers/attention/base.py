"""The interface between a step and an attention kernel.

Owns the description of one step's rows and the few methods a backend has. Knows neither slots nor plans
(`workers.input_batch` builds the metadata) and no model. A new backend is one file and one line in the registry.

Shape letters: T tokens of the step, S sequences, H query heads, G key/value heads, D head size, B blocks of the cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """The rows of one step: prefill sequences first, then decode sequences of one query token each.

    `seq_lens` counts the tokens whose K/V exist once this step's have been stored; the queries of a sequence are its
    last ones. Entries of `block_tables` past a sequence's last block are arbitrary and must not be read.
    """

    cu_seqlens_q: Tensor  # [S + 1] int32, first query row of each sequence
    seq_lens: Tensor  # [S] int32
    block_tables: Tensor  # [S, max blocks] int32
    slot_mapping: Tensor  # [T] int64, block * block_size + offset of each token's K/V
    max_seqlen_q: int
    max_seqlen_k: int
    num_prefill_seqs: int
    num_prefill_tokens: int
    num_decodes: int
    block_size: int
    rope_lens: Tensor | None = None  # [T] int64, models with dynamic rope only: see `workers.layers.rotary`

    @property
    def num_seqs(self) -> int:
        return self.num_prefill_seqs + self.num_decodes

    def prefill_rows(self) -> AttentionMetadata:
        """The same step without its decode rows."""
        num_seqs = self.num_prefill_seqs
        return replace(
            self,
            cu_seqlens_q=self.cu_seqlens_q[: num_seqs + 1],
            seq_lens=self.seq_lens[:num_seqs],
            block_tables=self.block_tables[:num_seqs],
            slot_mapping=self.slot_mapping[: self.num_prefill_tokens],
            num_decodes=0,
        )

    @classmethod
    def from_lists(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        *,
        block_size: int,
        num_decodes: int = 0,
        device: torch.device | str = "cpu",
    ) -> AttentionMetadata:
        """The plain way, for tests and profiling: an entry per sequence, the last `num_decodes` are decode rows."""
        assert len(query_lens) == len(seq_lens) == len(block_tables)
        starts = [0]
        mapping: list[int] = []
        for num_queries, length, blocks in zip(query_lens, seq_lens, block_tables, strict=True):
            starts.append(starts[-1] + num_queries)
            positions = range(length - num_queries, length)
            mapping.extend(blocks[p // block_size] * block_size + p % block_size for p in positions)
        width = max((len(blocks) for blocks in block_tables), default=0)
        padded = [[*blocks, *[0] * (width - len(blocks))] for blocks in block_tables]
        num_prefill_seqs = len(seq_lens) - num_decodes
        return cls(
            cu_seqlens_q=torch.tensor(starts, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            block_tables=torch.tensor(padded, dtype=torch.int32, device=device).view(len(seq_lens), width),
            slot_mapping=torch.tensor(mapping, dtype=torch.int64, device=device),
            max_seqlen_q=max(query_lens, default=0),
            max_seqlen_k=max(seq_lens, default=0),
            num_prefill_seqs=num_prefill_seqs,
            num_prefill_tokens=starts[num_prefill_seqs],
            num_decodes=num_decodes,
            block_size=block_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams:
    """How a layer attends; the same in every step.

    `window` is how many keys a query sees, its own included: position p attends to (p - window, p]. `soft_cap` c
    replaces a score s by c * tanh(s / c). A cache in fp8 holds keys divided by `k_scale` and values divided by
    `v_scale`; any other is in full precision and has scales of 1.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNeeds:
    """What a backend would have to serve: a model's heads, in this precision, on this device."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    block_size: int
    cache_dtype: torch.dtype | None = None  # of keys and values, as `workers.kv_format` keeps them; None: `dtype`
    soft_cap: bool = False  # whether scores are capped


class AttentionBackend(ABC):
    """Stores keys and values in the paged cache and attends over it.

    Within a layer `store_kv` runs for all tokens of the step before `attend` does, because sequences of one step may
    share blocks that this very step writes. A rank may hold no head at all (H = G = 0).
    """

    name: str
    capturable: ClassVar[bool] = False  # whether a CUDA graph may hold its decode rows: it reads nothing back
    cache_dtypes: ClassVar[tuple[torch.dtype, ...]] = ()  # of KV it reads and writes beside the model's own

    @classmethod
    def cache_refusal(cls, needs: AttentionNeeds) -> str | None:
        """Why it does not read the KV cache that they ask for; None if it does."""
        if needs.cache_dtype in (None, needs.dtype, *cls.cache_dtypes):
            return None
        return f"it has no kernels for a KV cache in {needs.cache_dtype} beside {needs.dtype}; cache.dtype decides"

    @classmethod
    def unavailable_reason(cls, needs: AttentionNeeds) -> str | None:
        """Why this backend cannot serve them; None if it can."""
        return None

    @abstractmethod
    def store_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, params: AttentionParams
    ) -> None:
        """Write k, v [T, G, D] to the places of `slot_mapping` [T] in the caches [B, block size, G, D].

        Numbers that a cache in fp8 cannot hold become its largest.
        """

    @abstractmethod
    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        """Causal attention of q [T, H, D] over the cache -> [T, H, D].

        H is a multiple of G; query head h reads key head h // (H / G).
        """
