"""The adapters of the flash-attn libraries, over stand-ins with their signatures and rules, and PyTorch inside."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

import tests.support.triton_interpreter  # noqa: F401  before any kernel
from workers.attention import AttentionMetadata, AttentionParams
from workers.attention.flash import Flash2Backend, Flash3Backend, Flash4Backend
from workers.attention.reference import ReferenceBackend

BLOCK_SIZE, HEADS, KV_HEADS, HEAD_DIM = 16, 6, 2, 32


def attend(q, k, v, table, starts, lengths, scale, causal, window, softcap):
    """Packed queries, by the reference; all the libraries align queries to the end of the keys."""
    assert causal and q.is_contiguous() and table.dtype == lengths.dtype == torch.int32
    left, right = window
    assert right in (0, -1, None)
    query_lens = (starts[1:] - starts[:-1]).tolist()
    meta = AttentionMetadata.from_lists(
        query_lens, lengths.tolist(), table.tolist(), block_size=k.shape[1], num_decodes=0
    )
    unlimited = left is None or left < 0
    params = AttentionParams(scale=scale, window=None if unlimited else left + 1, soft_cap=softcap or None)
    return ReferenceBackend().attend(q, k, v, meta, params)


def fa2_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    assert max_seqlen_q >= (cu_seqlens_q[1:] - cu_seqlens_q[:-1]).max()
    lengths = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
    return attend(q, k, v, block_table, cu_seqlens_q, lengths, softmax_scale, causal, window_size, softcap)


def fa2_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    assert q.shape[1] == 1
    starts = torch.arange(len(q) + 1, dtype=torch.int32)
    args = k_cache, v_cache, block_table, starts, cache_seqlens, softmax_scale, causal, window_size, softcap
    return attend(q.squeeze(1), *args).unsqueeze(1)


def fa3_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, page_table=None, cu_seqlens_q=None, max_seqlen_q=None,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, num_splits=0,
):  # fmt: skip
    step = page_table, cu_seqlens_q, cache_seqlens, softmax_scale, causal, window_size, softcap
    if cu_seqlens_q is not None:
        assert q.ndim == 3
        return attend(q, k_cache, v_cache, *step)
    return fa2_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=cache_seqlens, block_table=page_table, softmax_scale=softmax_scale,
        causal=causal, window_size=window_size, softcap=softcap,
    )  # fmt: skip


def fa4_varlen(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, seqused_q=None,
    seqused_k=None, page_table=None, softmax_scale=None, causal=False, window_size=(None, None), softcap=0.0,
    num_splits=1, pack_gqa=None, return_lse=False,
):  # fmt: skip
    assert cu_seqlens_k is None and num_splits == 1
    out = attend(q, k, v, page_table, cu_seqlens_q, seqused_k, softmax_scale, causal, window_size, softcap)
    return out, None


LIBRARIES = {
    Flash2Backend: {"flash_attn_varlen_func": fa2_varlen, "flash_attn_with_kvcache": fa2_with_kvcache},
    Flash3Backend: {"flash_attn_with_kvcache": fa3_with_kvcache},
    Flash4Backend: {"flash_attn_varlen_func": fa4_varlen},
}


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (7, None), (None, 3.0)])
@pytest.mark.parametrize("adapter", LIBRARIES, ids=lambda adapter: adapter.name)
def test_prompts_and_decode_rows_reach_each_library_in_its_own_terms(adapter, window, soft_cap, monkeypatch):
    package = adapter.module.rpartition(".")[0]
    library = ModuleType(adapter.module)
    for name, function in LIBRARIES[adapter].items():
        setattr(library, name, function)
    if package:
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setitem(sys.modules, adapter.module, library)

    def randn(*shape):
        return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))

    meta = AttentionMetadata.from_lists(
        [5, 9, 1, 1], [5, 30, 17, 33], [[3], [0, 6], [2, 4], [1, 5, 7]], block_size=BLOCK_SIZE, num_decodes=2
    )
    q = randn(16, HEADS, HEAD_DIM)
    k_cache, v_cache = randn(8, BLOCK_SIZE, KV_HEADS, HEAD_DIM), randn(8, BLOCK_SIZE, KV_HEADS, HEAD_DIM) * 2
    params = AttentionParams(scale=0.2, window=window, soft_cap=soft_cap)
    found = adapter().attend(q, k_cache, v_cache, meta, params)
    expected = ReferenceBackend().attend(q, k_cache, v_cache, meta, params)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
