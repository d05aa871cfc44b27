"""Paged attention against attention written out in full, one query at a time."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from workers.attention import AttentionMetadata, AttentionNeeds, AttentionParams, choose_backend
from workers.attention.reference import ReferenceBackend
from workers.kv_cache import KVCache
from workers.kv_format import decode, encode, row_width

HEAD_DIM = 8


def plain_attention(q_HD, k_SGD, v_SGD, position, *, scale, window, soft_cap):
    """One query, in float64, head by head."""
    first = 0 if window is None else max(0, position - window + 1)
    group = q_HD.shape[0] // k_SGD.shape[1]
    rows = []
    for head, query in enumerate(q_HD.double()):
        keys = k_SGD[first : position + 1, head // group].double()
        scores = keys @ query * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        rows.append(torch.softmax(scores, 0) @ v_SGD[first : position + 1, head // group].double())
    return torch.stack(rows).float()


class PagedScene:
    """Sequences whose keys lie scattered in a cache that is NaN wherever nobody wrote."""

    def __init__(
        self,
        query_lens,
        seq_lens,
        *,
        block_size,
        num_heads,
        num_kv_heads,
        num_decodes=0,
        seed=0,
        dtype=torch.float32,
        k_scale=1.0,
        v_scale=1.0,
    ):
        self.stored = AttentionParams(scale=1.0, k_scale=k_scale, v_scale=v_scale)
        rng = torch.Generator().manual_seed(seed)
        self.seq_lens, self.query_lens = seq_lens, query_lens
        num_blocks = sum(math.ceil(n / block_size) for n in seq_lens) + 3
        shuffled = iter(torch.randperm(num_blocks, generator=rng).tolist())
        tables = [list(itertools.islice(shuffled, math.ceil(n / block_size))) for n in seq_lens]
        self.cache = KVCache.allocate(
            num_layers=1,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=HEAD_DIM,
            dtype=dtype,
            device="cpu",
        )
        for cache in (self.cache.k[0], self.cache.v[0]):
            cache.view(torch.uint8).fill_(255)  # a NaN in every floating-point type, and in the scale of int8
        self.keys = [torch.randn(n, num_kv_heads, HEAD_DIM, generator=rng) for n in seq_lens]
        self.values = [torch.randn(n, num_kv_heads, HEAD_DIM, generator=rng) for n in seq_lens]
        self.queries = torch.randn(sum(query_lens), num_heads, HEAD_DIM, generator=rng)
        self.backend = ReferenceBackend()
        self.meta = AttentionMetadata.from_lists(
            query_lens, seq_lens, tables, block_size=block_size, num_decodes=num_decodes
        )
        old = [n - q for n, q in zip(seq_lens, query_lens, strict=True)]
        earlier = AttentionMetadata.from_lists(old, old, tables, block_size=block_size)
        self._store([slice(0, n) for n in old], earlier)
        self._store([slice(o, n) for o, n in zip(old, seq_lens, strict=True)], self.meta)

    def _store(self, parts, meta):
        k = torch.cat([keys[part] for keys, part in zip(self.keys, parts, strict=True)])
        v = torch.cat([values[part] for values, part in zip(self.values, parts, strict=True)])
        self.backend.store_kv(k, v, self.cache.k[0], self.cache.v[0], meta.slot_mapping, self.stored)

    def attend(self, **options):
        params = AttentionParams(k_scale=self.stored.k_scale, v_scale=self.stored.v_scale, **options)
        return self.backend.attend(self.queries, self.cache.k[0], self.cache.v[0], self.meta, params)

    def expected(self, *, scale, window=None, soft_cap=None):
        rows, queries = [], iter(self.queries)
        for keys, values, num_queries in zip(self.keys, self.values, self.query_lens, strict=True):
            for position in range(len(keys) - num_queries, len(keys)):
                rows.append(
                    plain_attention(
                        next(queries), keys, values, position, scale=scale, window=window, soft_cap=soft_cap
                    )
                )
        return torch.stack(rows)


@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 1, 7, 20])
@pytest.mark.parametrize("block_size", [1, 5, 16, 256])
def test_mixed_rows_attend_like_plain_attention(block_size, window, soft_cap):
    scene = PagedScene(
        query_lens=[9, 4, 1, 30, 1, 1, 1],
        seq_lens=[9, 21, 33, 30, 1, 17, 40],
        block_size=block_size,
        num_heads=6,
        num_kv_heads=2,
        num_decodes=3,
    )
    out = scene.attend(scale=0.3, window=window, soft_cap=soft_cap)
    torch.testing.assert_close(out, scene.expected(scale=0.3, window=window, soft_cap=soft_cap), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 1), (4, 4), (1, 1)])
def test_any_number_of_query_heads_may_share_a_key_head(num_heads, num_kv_heads):
    scene = PagedScene([5, 1], [8, 12], block_size=4, num_heads=num_heads, num_kv_heads=num_kv_heads, num_decodes=1)
    torch.testing.assert_close(scene.attend(scale=1.0), scene.expected(scale=1.0), atol=1e-5, rtol=1e-5)


def test_decode_rows_of_very_different_length_do_not_disturb_each_other():
    lengths = [1, 1500, 3, 700, 1499, 2, 650]
    scene = PagedScene([1] * 7, lengths, block_size=16, num_heads=2, num_kv_heads=1, num_decodes=7)
    torch.testing.assert_close(scene.attend(scale=0.5), scene.expected(scale=0.5), atol=1e-5, rtol=1e-5)


def test_a_long_prefill_is_computed_in_parts():
    scene = PagedScene([1100], [1130], block_size=64, num_heads=2, num_kv_heads=2)
    torch.testing.assert_close(scene.attend(scale=0.5), scene.expected(scale=0.5), atol=1e-5, rtol=1e-5)


def test_a_rank_without_heads_computes_nothing():
    scene = PagedScene([3, 1], [3, 9], block_size=4, num_heads=0, num_kv_heads=0, num_decodes=1)
    assert scene.attend(scale=1.0).shape == (4, 0, HEAD_DIM)


def test_the_choice_names_what_exists():
    needs = AttentionNeeds(device=torch.device("cpu"), dtype=torch.float32, head_dim=64, block_size=16)
    assert choose_backend("reference", needs).name == "reference"
    assert choose_backend("auto", needs).name
    with pytest.raises(ValueError, match=r"give auto or one of .*reference"):
        choose_backend("flash", needs)


def test_a_backend_serves_no_cache_that_it_cannot_read():
    needs = AttentionNeeds(
        device=torch.device("cpu"), dtype=torch.float32, cache_dtype=torch.int8, head_dim=64, block_size=16
    )
    assert choose_backend("auto", needs).name == "reference"
    with pytest.raises(ValueError, match=r"fa3: it has no kernels for a KV cache in torch\.int8"):
        choose_backend("fa3", needs)


def test_eight_bits_keep_each_number_within_half_a_step_of_its_heads_largest():
    x = torch.randn(50, 3, HEAD_DIM) * torch.logspace(-6, 3, 50)[:, None, None]
    x[7] = 0.0
    rows = encode(x, torch.int8)
    assert rows.shape == (50, 3, row_width(HEAD_DIM, torch.int8))
    kept = decode(rows, torch.float32)
    assert ((kept - x).abs() <= 0.501 / 127 * x.abs().amax(-1, keepdim=True)).all()
    assert (kept[7] == 0).all()


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_attention_over_eight_bits_is_near_that_over_exact_keys(window, soft_cap):
    scene = PagedScene(
        [7, 5, 1, 1], [7, 23, 30, 4], block_size=4, num_heads=6, num_kv_heads=2, num_decodes=2, dtype=torch.int8
    )
    options = {"scale": 0.3, "window": window, "soft_cap": soft_cap}
    error = scene.attend(**options) - scene.expected(**options)
    assert error.norm() < 0.02 * scene.expected(**options).norm()


def test_copied_blocks_are_read_before_any_is_written():
    cache = KVCache.allocate(
        num_layers=2, num_blocks=3, block_size=2, num_kv_heads=1, head_dim=1, dtype=torch.float32, device="cpu"
    )
    for block in range(3):
        cache.k[1][block] = block
    cache.copy_blocks(torch.tensor([0, 1]), torch.tensor([1, 2]))
    assert cache.k[1][:3, 0, 0, 0].tolist() == [0, 0, 1]
