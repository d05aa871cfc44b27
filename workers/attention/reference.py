"""Paged attention in plain PyTorch, on any device. It defines what is correct; other backends are compared with it.

Keys and values are gathered out of the cache, then attended to by `scaled_dot_product_attention` (or by plain
matrix products where scores are capped, which it cannot do). Decode rows of similar length share one call. What to
gather is planned once per step and window and serves every layer of the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from workers.attention.base import AttentionBackend, AttentionMetadata, AttentionNeeds, AttentionParams
from workers.kv_format import as_bytes
from workers.kv_format import decode as decode_rows
from workers.kv_format import encode as encode_rows

# A call costs about as much as gathering this many tokens too many: rows share a call up to there.
_PADDING_PER_CALL = 512
_GATHERED_TOKENS_PER_CALL = 1 << 17  # bounds the memory of one gather
_QUERIES_PER_CALL = 1 << 10  # bounds the memory of one score matrix


@dataclass(frozen=True, slots=True, eq=False)
class _Prefill:
    """Some consecutive queries of one sequence and the blocks that hold the keys they see."""

    queries: slice  # rows of q
    blocks: Tensor  # [n] int64
    first_key: int  # within the gathered blocks
    num_keys: int
    mask: Tensor | None  # [queries, keys] bool; None: purely causal, as many keys as queries


@dataclass(frozen=True, slots=True, eq=False)
class _Decode:
    """Decode rows of similar length."""

    rows: Tensor | slice  # rows of q
    places: Tensor  # [n * keys] int64, token places in the flattened cache
    num_keys: int
    mask: Tensor | None  # [n, 1, 1, keys] bool; None: all keys are real


@dataclass(slots=True, eq=False)
class _StepPlan:
    """What one step gathers, per window."""

    meta: AttentionMetadata
    by_window: dict[int | None, tuple[list[_Prefill], list[_Decode]]] = field(default_factory=dict)


class ReferenceBackend(AttentionBackend):
    """The PyTorch backend. Reads no place of the cache that was not written for the sequence at hand."""

    name = "reference"
    cache_dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8)

    @classmethod
    def cache_refusal(cls, needs: AttentionNeeds) -> str | None:
        if needs.device.type == "cuda" and needs.cache_dtype == torch.float8_e4m3fn:
            return "on a GPU it would convert fp8 too slowly to serve; leave cache.dtype out"
        return super().cache_refusal(needs)

    def __init__(self) -> None:
        self._step: _StepPlan | None = None

    def store_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, params: AttentionParams
    ) -> None:
        if k.numel() == 0:
            return
        _store(k, k_cache, slot_mapping, params.k_scale)
        _store(v, v_cache, slot_mapping, params.v_scale)

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        out = torch.empty_like(q)
        if q.numel() == 0:
            return out
        num_kv_heads = k_cache.shape[2]
        prefills, decodes = self._plan(meta, params.window)
        for prefill in prefills:
            k, v = (decode_rows(_gather_blocks(cache, prefill), q.dtype) for cache in (k_cache, v_cache))
            out[prefill.queries] = _attend_prefill(q[prefill.queries], k, v, prefill.mask, params)
        for decode in decodes:
            k, v = (decode_rows(_gather_places(cache, decode), q.dtype) for cache in (k_cache, v_cache))
            q_NGRD = q[decode.rows].unflatten(1, (num_kv_heads, -1))
            # The query heads of a group take the place of query positions: they read the same keys.
            out[decode.rows] = _attend(q_NGRD, k, v, decode.mask, params).flatten(1, 2)
        return out

    def _plan(self, meta: AttentionMetadata, window: int | None) -> tuple[list[_Prefill], list[_Decode]]:
        if self._step is None or self._step.meta is not meta:
            self._step = _StepPlan(meta)
        planned = self._step.by_window.get(window)
        if planned is None:
            planned = (_plan_prefills(meta, window), _plan_decodes(meta, window))
            self._step.by_window[window] = planned
        return planned


def _plan_prefills(meta: AttentionMetadata, window: int | None) -> list[_Prefill]:
    starts = meta.cu_seqlens_q[: meta.num_prefill_seqs + 1].tolist()
    lengths = meta.seq_lens[: meta.num_prefill_seqs].tolist()
    plans = []
    for i, length in enumerate(lengths):
        for start in range(starts[i], starts[i + 1], _QUERIES_PER_CALL):
            end = min(start + _QUERIES_PER_CALL, starts[i + 1])
            last = length - (starts[i + 1] - end)  # keys that the last query of this part sees
            plans.append(_plan_prefill(meta, i, slice(start, end), last, window))
    return plans


def _plan_prefill(meta: AttentionMetadata, seq: int, queries: slice, num_seen: int, window: int | None) -> _Prefill:
    num_queries = queries.stop - queries.start
    first_query = num_seen - num_queries
    first_key = 0 if window is None else max(0, first_query + 1 - window)
    first_block = first_key // meta.block_size
    last_block = (num_seen + meta.block_size - 1) // meta.block_size
    mask = None
    if first_query > 0 or (window is not None and window < num_seen):
        query = torch.arange(first_query, num_seen, device=meta.seq_lens.device)[:, None]
        key = torch.arange(first_key, num_seen, device=meta.seq_lens.device)
        mask = key <= query
        if window is not None:
            mask &= key > query - window
    return _Prefill(
        queries=queries,
        blocks=meta.block_tables[seq, first_block:last_block].to(torch.int64),
        first_key=first_key - first_block * meta.block_size,
        num_keys=num_seen - first_key,
        mask=mask,
    )


def _plan_decodes(meta: AttentionMetadata, window: int | None) -> list[_Decode]:
    if meta.num_decodes == 0:
        return []
    lengths = meta.seq_lens[meta.num_prefill_seqs :].to(torch.int64)
    first_keys = torch.zeros_like(lengths) if window is None else (lengths - window).clamp_(min=0)
    num_keys = lengths - first_keys
    order = torch.argsort(num_keys, descending=True, stable=True)
    runs = _similar_runs(num_keys[order].tolist())
    if len(runs) == 1:  # the usual case keeps the step's order: its queries are a slice
        rows = slice(meta.num_prefill_tokens, meta.num_prefill_tokens + meta.num_decodes)
        return [_plan_decode(meta, slice(None), rows, first_keys, lengths)]
    groups = [order[start:end] for start, end in runs]
    return [_plan_decode(meta, group, group + meta.num_prefill_tokens, first_keys, lengths) for group in groups]


def _similar_runs(num_keys: list[int]) -> list[tuple[int, int]]:
    """Cut the descending lengths into runs that may share one padded call."""
    runs = []
    start, padding = 0, 0
    for i, length in enumerate(num_keys):
        padding += num_keys[start] - length
        if padding > _PADDING_PER_CALL or (i - start + 1) * num_keys[start] > _GATHERED_TOKENS_PER_CALL:
            if i > start:
                runs.append((start, i))
            start, padding = i, 0
    runs.append((start, len(num_keys)))
    return runs


def _plan_decode(
    meta: AttentionMetadata, group: Tensor | slice, rows: Tensor | slice, first_keys: Tensor, lengths: Tensor
) -> _Decode:
    """One call for `group` of the decode sequences, whose queries are `rows` of q."""
    first_keys, lengths = first_keys[group, None], lengths[group, None]
    width = int((lengths - first_keys).max())
    keys = first_keys + torch.arange(width, device=lengths.device)
    real = keys < lengths
    # Past its end a row reads its own newest key again, then masks it: never a place that somebody else wrote.
    keys = torch.minimum(keys, lengths - 1)
    blocks = meta.block_tables[meta.num_prefill_seqs :][group].to(torch.int64).gather(1, keys // meta.block_size)
    places = blocks * meta.block_size + keys % meta.block_size
    mask = None if bool(real.all()) else real[:, None, None, :]
    return _Decode(rows=rows, places=places.flatten(), num_keys=width, mask=mask)


def _take(cache: Tensor, index: Tensor) -> Tensor:
    """cache[index], as bytes if those are its numbers: torch does not pick fp8 by index on every device."""
    return as_bytes(cache).index_select(0, index).view(cache.dtype)


def _gather_blocks(cache: Tensor, plan: _Prefill) -> Tensor:
    """[keys, G, D] of one sequence."""
    gathered = _take(cache, plan.blocks).flatten(0, 1)
    return gathered[plan.first_key : plan.first_key + plan.num_keys]


def _gather_places(cache: Tensor, plan: _Decode) -> Tensor:
    """[n, G, keys, D] of the rows of one group."""
    flat = cache.view(-1, *cache.shape[2:])
    gathered = _take(flat, plan.places)
    return gathered.unflatten(0, (-1, plan.num_keys)).transpose(1, 2)


def _store(values: Tensor, cache: Tensor, slot_mapping: Tensor, scale: float) -> None:
    """A token's values [T, G, D] to their places in the cache."""
    flat, rows = cache.view(-1, *cache.shape[2:]), encode_rows(values, cache.dtype, scale)
    as_bytes(flat).index_copy_(0, slot_mapping, as_bytes(rows))


def _attend_prefill(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, params: AttentionParams) -> Tensor:
    num_kv_heads = k.shape[1]
    # One batch entry per key head, its query heads as the heads: keys are shared by a stride of 0, not copied.
    q_GRTD = q.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
    k_GRSD = k.transpose(0, 1)[:, None].expand(-1, q_GRTD.shape[1], -1, -1)
    v_GRSD = v.transpose(0, 1)[:, None].expand(-1, q_GRTD.shape[1], -1, -1)
    out_GRTD = _attend(q_GRTD, k_GRSD, v_GRSD, mask, params, causal=mask is None)
    return out_GRTD.permute(2, 0, 1, 3).flatten(1, 2)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, params: AttentionParams, *, causal: bool = False
) -> Tensor:
    """[N, H, queries, D] over [N, H, keys, D]; `mask` broadcasts to [N, H, queries, keys], True: visible."""
    scale = params.scale * params.k_scale
    if params.soft_cap is None:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, is_causal=causal)
    else:
        scores = (q @ k.transpose(-1, -2)).to(torch.float32) * scale
        scores = torch.tanh(scores / params.soft_cap) * params.soft_cap
        if causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        out = torch.softmax(scores, dim=-1).to(v.dtype) @ v
    return out if params.v_scale == 1.0 else out * params.v_scale
