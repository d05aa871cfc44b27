"""The Triton attention kernels, interpreted, against the PyTorch reference. What was not written is NaN."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

import tests.support.triton_interpreter  # noqa: F401  before any kernel
from workers.attention import AttentionMetadata, AttentionNeeds, AttentionParams, choose_backend
from workers.attention.reference import ReferenceBackend
from workers.attention.triton_paged import PairedBackend, TritonPagedBackend, probe
from workers.kernels.triton.splits import plan_splits
from workers.kernels.triton.tuning import INTERPRETER, Device

FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}


PLAIN = AttentionParams(scale=1.0)


class PagedScene:
    """Sequences scattered over a cache that is NaN wherever nobody wrote, their block tables ending in garbage."""

    def __init__(
        self,
        query_lens,
        seq_lens,
        *,
        num_decodes=0,
        block_size=16,
        heads=(4, 2),
        head_dim=64,
        dtype,
        cache_dtype=None,
        params=PLAIN,
        seed=0,
    ):
        rng = torch.Generator().manual_seed(seed)
        num_heads, num_kv_heads = heads
        num_blocks = sum(math.ceil(n / block_size) for n in seq_lens) + 2
        shuffled = iter(torch.randperm(num_blocks, generator=rng).tolist())
        tables = [list(itertools.islice(shuffled, math.ceil(n / block_size))) for n in seq_lens]
        shape = (num_blocks + 1, block_size, num_kv_heads, head_dim)
        self.params = dataclasses.replace(params, scale=head_dim**-0.5)
        self.k_cache, self.v_cache = (torch.full(shape, torch.nan, dtype=cache_dtype or dtype) for _ in range(2))
        written = AttentionMetadata.from_lists(seq_lens, seq_lens, tables, block_size=block_size)
        k, v = (torch.randn(sum(seq_lens), *shape[2:], generator=rng).to(dtype) for _ in range(2))
        self.new = k, v, written.slot_mapping
        TritonPagedBackend().store_kv(k, v, self.k_cache, self.v_cache, written.slot_mapping, self.params)
        width = max(len(table) for table in tables) + 1
        garbage = [[*table, *[2**30] * (width - len(table))] for table in tables]
        options = {"block_size": block_size, "num_decodes": num_decodes}
        self.meta = AttentionMetadata.from_lists(query_lens, seq_lens, garbage, **options)
        self.clean_meta = AttentionMetadata.from_lists(query_lens, seq_lens, tables, **options)
        self.q = torch.randn(sum(query_lens), num_heads, head_dim, generator=rng).to(dtype)

    def error(self, backend=None):
        """Against the reference, in float32 over the very same cache."""
        out = (backend or TritonPagedBackend()).attend(self.q, self.k_cache, self.v_cache, self.meta, self.params)
        expected = ReferenceBackend().attend(self.q.float(), self.k_cache, self.v_cache, self.clean_meta, self.params)
        return float((out.float() - expected).norm() / expected.norm())

    def stored_by(self, backend):
        caches = torch.full_like(self.k_cache, torch.nan), torch.full_like(self.v_cache, torch.nan)
        k, v, slots = self.new
        backend.store_kv(k, v, *caches, slots, self.params)
        return caches


@pytest.mark.parametrize(
    ("block_size", "heads", "head_dim", "dtype", "window", "soft_cap"),
    [
        (16, (4, 4), 64, torch.float32, None, None),
        (64, (6, 2), 64, torch.float16, 20, None),
        (256, (8, 1), 128, torch.float16, None, None),
        (16, (8, 1), 128, torch.float32, 100, 3.0),
        (64, (3, 3), 256, torch.float16, None, 5.0),
        (48, (3, 1), 80, torch.float32, 300, None),
        (256, (16, 2), 256, torch.float16, 1, None),
        (16, (6, 2), 128, torch.bfloat16, 50, None),
    ],
)
def test_mixed_rows_attend_as_the_reference_does(block_size, heads, head_dim, dtype, window, soft_cap):
    scene = PagedScene(
        query_lens=[9, 3, 40, 1, 1, 1],
        seq_lens=[9, 21, 130, 1, 17, 300],
        num_decodes=3,
        block_size=block_size,
        heads=heads,
        head_dim=head_dim,
        dtype=dtype,
        params=AttentionParams(scale=1.0, window=window, soft_cap=soft_cap),
    )
    assert scene.error() < TOLERANCE[dtype]


@pytest.mark.parametrize("window", [None, 700])
def test_a_long_sequence_is_decoded_in_parts_and_merged(window):
    params = AttentionParams(scale=1.0, window=window)
    scene = PagedScene([1, 1, 1], [600, 5, 1500], num_decodes=3, heads=(2, 1), dtype=torch.float32, params=params)
    assert scene.error() < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("block_size", "heads", "head_dim", "dtype", "window", "soft_cap"),
    [
        (16, (4, 4), 64, torch.float32, None, None),
        (64, (6, 2), 128, torch.float16, 20, None),
        (256, (8, 1), 256, torch.float16, None, None),
        (16, (8, 1), 128, torch.float32, 100, 3.0),
        (64, (3, 3), 256, torch.float32, None, 5.0),
        (256, (3, 1), 64, torch.float16, 300, None),
        (64, (6, 2), 128, torch.bfloat16, None, 5.0),
    ],
)
def test_keys_and_values_in_fp8_are_those_that_the_reference_stores_and_reads(
    block_size, heads, head_dim, dtype, window, soft_cap
):
    scene = PagedScene(
        query_lens=[9, 3, 40, 1, 1, 1],
        seq_lens=[9, 21, 130, 1, 17, 600],
        num_decodes=3,
        block_size=block_size,
        heads=heads,
        head_dim=head_dim,
        dtype=dtype,
        cache_dtype=FP8,
        params=AttentionParams(scale=1.0, window=window, soft_cap=soft_cap, k_scale=0.02, v_scale=0.3),
    )
    for found, expected in zip((scene.k_cache, scene.v_cache), scene.stored_by(ReferenceBackend()), strict=True):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert scene.error() < TOLERANCE[dtype]


@pytest.mark.parametrize("backend", [TritonPagedBackend(), ReferenceBackend()], ids=lambda backend: backend.name)
def test_what_fp8_cannot_hold_becomes_its_largest(backend):
    values = torch.tensor([1e-9, 1.0, 447.0, 464.0, 1e4, torch.inf, -465.0, -torch.inf] * 2).view(1, 1, 16)
    k_cache, v_cache = (torch.zeros(1, 16, 1, 16, dtype=FP8) for _ in range(2))
    params = AttentionParams(scale=1.0, k_scale=1.0, v_scale=0.5)
    backend.store_kv(values, values, k_cache, v_cache, torch.tensor([3]), params)
    assert k_cache[0, 3, 0, :8].tolist() == [0, 1, 448, 448, 448, 448, -448, -448]
    assert v_cache[0, 3, 0, :8].tolist() == [0, 2, 448, 448, 448, 448, -448, -448]
    values[0, 0, 5] = torch.nan  # no number: it must show, not become one
    backend.store_kv(values, values, k_cache, v_cache, torch.tensor([3]), params)
    assert k_cache[0, 3, 0].isnan().nonzero().flatten().tolist() == [5]


def test_scores_far_apart_between_parts_do_not_overflow_their_merge():
    scene = PagedScene([1], [1100], num_decodes=1, heads=(2, 1), dtype=torch.float32)
    scene.k_cache *= 50.0
    assert scene.error() < TOLERANCE[torch.float32]


def test_a_row_without_keys_gives_zeros():
    scene = PagedScene([1, 1], [600, 1], num_decodes=2, heads=(2, 1), dtype=torch.float32)
    scene.meta.seq_lens[0] = 0
    out = TritonPagedBackend().attend(scene.q, scene.k_cache, scene.v_cache, scene.meta, PLAIN)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert not out.isnan().any()


def test_how_a_sequence_is_cut_does_not_depend_on_the_batch_around_it():
    def parts_of_last(seq_lens):
        device = Device(capability=0, num_multiprocessors=132)
        plan = plan_splits(torch.tensor(seq_lens, dtype=torch.int32), num_kv_heads=8, window=None, device=device)
        return (plan.first_items[-1] - plan.first_items[-2]).item()

    assert parts_of_last([5000]) == parts_of_last([1, 0, 70_000, 5000]) == 20
    assert parts_of_last([100_000]) == 49


def test_the_work_list_names_every_part_once():
    seq_lens = torch.tensor([700, 0, 1, 513], dtype=torch.int32)
    plan = plan_splits(seq_lens, num_kv_heads=1, window=None, device=INTERPRETER)
    assert plan.first_items.tolist() == [0, 3, 3, 4, 7]
    listed = [divmod(item, plan.max_splits) for item in plan.items[:7].tolist()]
    assert listed == [(0, 0), (0, 1), (0, 2), (2, 0), (3, 0), (3, 1), (3, 2)]


def test_a_token_without_a_slot_is_not_stored():
    backend = TritonPagedBackend()
    k_cache, v_cache = torch.zeros(2, 16, 1, 16), torch.zeros(2, 16, 1, 16)
    backend.store_kv(torch.ones(2, 1, 16), torch.ones(2, 1, 16), k_cache, v_cache, torch.tensor([-1, 17]), PLAIN)
    assert k_cache.sum() == v_cache.sum() == 16
    assert k_cache[1, 1].sum() == 16


def test_keys_may_be_a_part_of_the_fused_projection():
    fused = torch.randn(3, 6, 16)
    k_cache, v_cache = torch.zeros(1, 16, 2, 16), torch.zeros(1, 16, 2, 16)
    TritonPagedBackend().store_kv(fused[:, 2:4], fused[:, 4:], k_cache, v_cache, torch.arange(3), PLAIN)
    assert torch.equal(k_cache[0, :3], fused[:, 2:4])
    assert torch.equal(v_cache[0, :3], fused[:, 4:])


def test_two_backends_may_share_the_work():
    scene = PagedScene([7, 1], [20, 30], num_decodes=1, dtype=torch.float32)
    paired = PairedBackend(TritonPagedBackend(), TritonPagedBackend())
    assert paired.name == "triton+triton"
    assert scene.error(paired) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", ["triton", "flash_attn", "fa3", "fa4", "fa4+triton"])
def test_without_a_gpu_the_log_says_why_not(name):
    needs = AttentionNeeds(device=torch.device("cpu"), dtype=torch.bfloat16, head_dim=64, block_size=256)
    with pytest.raises(ValueError, match="it needs a CUDA device, not cpu"):
        choose_backend(name, needs)
    assert choose_backend("auto", needs).name == "reference"


def test_a_trial_call_tells_backends_that_work_from_those_that_do_not():
    class Forgetful(TritonPagedBackend):
        def decode(self, q, k_cache, v_cache, meta, out, params):
            out[meta.num_prefill_tokens :] = 0.0

    class Absent(TritonPagedBackend):
        def __init__(self):
            raise ImportError("undefined symbol: torch_of_last_year\nand a long story")

    needs = AttentionNeeds(device=torch.device("cpu"), dtype=torch.float16, head_dim=64, block_size=16)
    assert probe(TritonPagedBackend, needs) is None
    assert "was off by" in probe(Forgetful, needs)
    assert probe(Absent, needs) == "a trial call failed (ImportError: undefined symbol: torch_of_last_year)"


@pytest.mark.parametrize("name", ["auto", "triton"])
def test_a_card_that_cannot_convert_fp8_is_told_so_and_nothing_slow_takes_its_place(name, monkeypatch):
    monkeypatch.setattr("workers.attention.triton_paged.triton_unavailable_reason", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    needs = AttentionNeeds(
        device=torch.device("cuda"), dtype=torch.bfloat16, cache_dtype=FP8, head_dim=128, block_size=256
    )
    with pytest.raises(ValueError, match=r"a KV cache in fp8 needs .* 8\.9, not 8\.0; leave cache\.dtype out"):
        choose_backend(name, needs)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fa3", "it reads a KV cache in fp8 only for queries in fp8"),
        ("fa4", "it has no kernels for a KV cache in torch.float8_e4m3fn"),
        ("flash_attn", "it has no kernels for a KV cache in torch.float8_e4m3fn"),
    ],
)
def test_the_libraries_say_why_they_pass_over_a_cache_in_fp8(name, reason):
    needs = AttentionNeeds(
        device=torch.device("cuda"), dtype=torch.bfloat16, cache_dtype=FP8, head_dim=128, block_size=256
    )
    with pytest.raises(ValueError, match=reason):
        choose_backend(name, needs)


def test_a_trial_call_covers_a_cache_in_fp8():
    class Careless(TritonPagedBackend):
        """Forgets that keys were divided."""

        def store_kv(self, k, v, k_cache, v_cache, slot_mapping, params):
            super().store_kv(k * 0.5, v, k_cache, v_cache, slot_mapping, params)

    needs = AttentionNeeds(device=torch.device("cpu"), dtype=torch.float16, cache_dtype=FP8, head_dim=64, block_size=16)
    assert probe(TritonPagedBackend, needs) is None
    assert "was off by" in probe(Careless, needs)
