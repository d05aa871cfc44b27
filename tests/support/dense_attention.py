"""The plainest attention over the paged cache: one sequence at a time, the whole score matrix at once."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.attention.base import AttentionBackend, AttentionMetadata, AttentionParams


class DenseAttention(AttentionBackend):
    name = "dense"

    def store_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, params: AttentionParams
    ) -> None:
        k_cache.view(-1, *k.shape[1:])[slot_mapping] = k
        v_cache.view(-1, *v.shape[1:])[slot_mapping] = v

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        rows = []
        starts = meta.cu_seqlens_q.tolist()
        for index, length in enumerate(meta.seq_lens.tolist()):
            queries = q[starts[index] : starts[index + 1]].transpose(0, 1)  # [H, Q, D]
            blocks = meta.block_tables[index, : -(-length // meta.block_size)].long()
            group = q.shape[1] // k_cache.shape[2]
            keys, values = (
                cache[blocks].flatten(0, 1)[:length].transpose(0, 1).repeat_interleave(group, dim=0)
                for cache in (k_cache, v_cache)
            )
            scores = queries @ keys.transpose(1, 2) * params.scale
            if params.soft_cap is not None:
                scores = torch.tanh(scores / params.soft_cap) * params.soft_cap
            query_positions = torch.arange(length - queries.shape[1], length).unsqueeze(1)
            key_positions = torch.arange(length)
            hidden = key_positions > query_positions
            if params.window is not None:
                hidden |= key_positions <= query_positions - params.window
            weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1, dtype=torch.float32).to(q.dtype)
            rows.append((weights @ values).transpose(0, 1))
        return torch.cat(rows)
