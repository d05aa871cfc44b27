"""The flash-attn libraries as backends: FlashAttention 2, 3 and 4, each where its own rules allow it.

Nothing of them is imported until it is considered, and importing proves nothing (2 and 4 share a package name): a
backend is available when a tiny paged call on this very device runs and gives what the PyTorch reference gives.
Where a library lacks one of the two halves, own Triton kernels do that half. Knows no model.

    library                import                            paged rule                         splits its keys
    FlashAttention 2       flash_attn.flash_attn_interface   block_size % 256 == 0              yes
    FlashAttention 3       flash_attn_interface              any block size; sm_90              yes
    FlashAttention 4       flash_attn.cute                   any block size; sm_90 and sm_100   on sm_100 only
"""

from __future__ import annotations

from abc import abstractmethod
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from workers.attention.base import AttentionMetadata, AttentionNeeds, AttentionParams
from workers.attention.triton_paged import FP8, TritonPagedBackend
from workers.kernels.available import describe


class FlashBackend(TritonPagedBackend):
    """What the libraries have in common. Keys and values are stored by the Triton kernel; so is any half they lack."""

    cache_dtypes = ()
    module: ClassVar[str]
    capabilities: ClassVar[tuple[int, ...]]  # major versions of the devices it serves
    max_head_dim: ClassVar[int] = 256
    block_multiple: ClassVar[int] = 1
    table_argument: ClassVar[str] = "block_table"  # of flash_attn_with_kvcache

    def __init__(self) -> None:
        super().__init__()
        self._library: ModuleType = import_module(self.module)

    @classmethod
    def unavailable_reason(cls, needs: AttentionNeeds) -> str | None:
        if needs.device.type != "cuda":
            return f"it needs a CUDA device, not {needs.device.type}"
        capability = torch.cuda.get_device_capability(needs.device)
        if capability[0] not in cls.capabilities:
            return f"it does not serve compute capability {capability[0]}.{capability[1]}"
        if needs.dtype not in (torch.bfloat16, torch.float16):
            return f"it has no kernels for {needs.dtype}"
        if needs.head_dim > cls.max_head_dim or needs.head_dim % 8:
            return f"heads of {needs.head_dim}; it serves multiples of 8 up to {cls.max_head_dim}"
        if needs.block_size % cls.block_multiple:
            return f"block_size {needs.block_size} is no multiple of {cls.block_multiple}"
        try:
            import_module(cls.module)
        except Exception as error:  # a library built for another torch fails in ways of its own
            return f"{cls.module} cannot be imported ({describe(error)})"
        return super().unavailable_reason(needs)

    def prefill(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMetadata, out: Tensor, params: AttentionParams
    ) -> None:
        num_tokens = meta.num_prefill_tokens
        out[:num_tokens] = self._call(q[:num_tokens], k_cache, v_cache, meta.prefill_rows(), params)

    def decode(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMetadata, out: Tensor, params: AttentionParams
    ) -> None:
        attended = self._library.flash_attn_with_kvcache(
            q[meta.num_prefill_tokens :].unsqueeze(1),
            k_cache,
            v_cache,
            cache_seqlens=meta.seq_lens[meta.num_prefill_seqs :],
            **{self.table_argument: meta.block_tables[meta.num_prefill_seqs :]},
            **_options(params),
        )
        out[meta.num_prefill_tokens :] = attended.squeeze(1)

    @abstractmethod
    def _call(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        """Causal attention of packed queries, aligned to the end of the keys, over the paged cache.

        `rows` are prefill rows alone.
        """


def _options(params: AttentionParams) -> dict[str, Any]:
    """The arguments that all of the libraries' functions share."""
    return {
        "softmax_scale": params.scale,
        "causal": True,
        "window_size": (-1, -1) if params.window is None else (params.window - 1, 0),
        "softcap": params.soft_cap or 0.0,
    }


class Flash2Backend(FlashBackend):
    """FlashAttention 2 (the package flash-attn) for both halves, where blocks are multiples of 256 tokens."""

    name = "flash_attn"
    module = "flash_attn.flash_attn_interface"
    capabilities = (8, 9, 10, 12)
    block_multiple = 256

    def _call(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        # Its varlen function takes the keys' lengths as a running sum.
        ends = torch.nn.functional.pad(rows.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        out: Tensor = self._library.flash_attn_varlen_func(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q=rows.cu_seqlens_q,
            cu_seqlens_k=ends,
            max_seqlen_q=rows.max_seqlen_q,
            max_seqlen_k=rows.max_seqlen_k,
            block_table=rows.block_tables,
            **_options(params),
        )
        return out


class Flash3Backend(FlashBackend):
    """FlashAttention 3 on Hopper, both halves by one function."""

    name = "fa3"
    module = "flash_attn_interface"
    table_argument = "page_table"
    capabilities = (9,)

    @classmethod
    def cache_refusal(cls, needs: AttentionNeeds) -> str | None:
        if needs.cache_dtype == FP8:
            return "it reads a KV cache in fp8 only for queries in fp8"
        return super().cache_refusal(needs)

    def _call(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        out: Tensor = self._library.flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            cache_seqlens=rows.seq_lens,
            page_table=rows.block_tables,
            cu_seqlens_q=rows.cu_seqlens_q,
            max_seqlen_q=rows.max_seqlen_q,
            **_options(params),
        )
        return out


class Flash4Backend(FlashBackend):
    """FlashAttention 4 for prefill. It cannot split a sequence's keys on Hopper, so own kernels do the decode rows."""

    name = "fa4"
    module = "flash_attn.cute"
    capabilities = (9, 10)
    decode = TritonPagedBackend.decode

    def _call(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        options = _options(params)
        if params.window is None:  # its own way to say so
            options["window_size"] = (None, None)
        found = self._library.flash_attn_varlen_func(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q=rows.cu_seqlens_q,
            seqused_k=rows.seq_lens,
            max_seqlen_q=rows.max_seqlen_q,
            max_seqlen_k=rows.max_seqlen_k,
            page_table=rows.block_tables,
            num_splits=1,  # anything else asks for splits, which sm_90 refuses
            **options,
        )
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out
