"""Every CPU kernel against PyTorch, in every instruction set that this machine can run, on one thread and on two."""

from __future__ import annotations

import itertools
import math
import threading

import pytest
import torch
import torch.nn.functional as F

from tests.support.cpu_kernels import attend, linear, read_back, rms_norm, store_kv
from workers.attention.base import AttentionMetadata, AttentionParams
from workers.attention.reference import ReferenceBackend
from workers.kernels.cpu.library import Format, PackedMatrix, Pool, Then
from workers.kv_format import decode, encode, row_bytes

SHAPES = [(96, 64), (40, 24), (7, 5), (33, 130), (1, 1)]  # outputs, inputs
ROWS = (1, 2, 5, 12, 13, 16, 17, 33, 70)
KV_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
KV_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-5, torch.int8: 1e-4}  # operands of 15 or 16 bits
NAN_BYTE = 255  # NaN in every floating-point type, and in the scale of int8
TOLERANCE = {Format.FLOAT32: 2e-6, Format.BFLOAT16: 2e-6, Format.INT8: 2e-4, Format.INT4: 2e-4}
INT4_ROWS_IN_16_BITS = 33  # with AMX, weights in 4 bits are rounded to bfloat16 numbers for so many rows


def random(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def kept_exactly(weight, weight_format):
    """The nearest weights that the format can hold."""
    if weight_format is Format.INT8:
        step = weight.abs().amax(dim=1, keepdim=True) / 127
        return (weight / step).round() * step
    if weight_format is Format.INT4:
        return torch.cat([from_levels(group, 15) for group in weight.split(32, dim=1)], dim=1)
    return weight.bfloat16().float() if weight_format is Format.BFLOAT16 else weight


def from_levels(group, num_steps):
    """The weights of one group for each output, moved to the nearest of evenly spaced levels."""
    least = group.amin(dim=1, keepdim=True)
    step = ((group.amax(dim=1, keepdim=True) - least) / num_steps).half().float()
    level = ((group - least) / step.where(step > 0, torch.ones(()))).round().clamp(0, num_steps)
    return level * step + least.half().float()


def tolerance_of(kernels, weight_format, num_rows):
    in_16_bits = weight_format is Format.INT4 and kernels.variant == "amx" and num_rows >= INT4_ROWS_IN_16_BITS
    return 5e-3 if in_16_bits else TOLERANCE[weight_format]


def assert_near(actual, expected, tolerance):
    """Within a share of the largest number expected."""
    assert not actual.isnan().any()
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("weight_format", Format)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_any_number_of_rows_equal_those_of_pytorch(kernels, pool, weight_format, shape):
    weight, bias = kept_exactly(random(*shape, scale=0.1), weight_format), random(shape[0], seed=1)
    matrix = PackedMatrix(kernels, pool, weight, bias, format=weight_format, exact=True)
    for num_rows in ROWS:
        x = random(num_rows, shape[1], seed=num_rows)
        actual = linear(kernels, pool, matrix, x, shape[0], Then.STORE)
        assert_near(actual, F.linear(x, weight, bias), tolerance_of(kernels, weight_format, num_rows))


@pytest.mark.parametrize("weight_format", Format)
@pytest.mark.parametrize("exact", [True, False])
def test_products_of_many_rows_by_wide_matrices_equal_those_of_pytorch(kernels, pool, weight_format, exact):
    """More of both than the caches hold, so that they are multiplied part by part."""
    weight = kept_exactly(random(70, 2600, scale=0.1), weight_format)
    matrix = PackedMatrix(kernels, pool, weight, format=weight_format, exact=exact)
    x = random(700, 2600).bfloat16().float()
    actual = linear(kernels, pool, matrix, x, 70, Then.ADD)
    assert_near(actual, F.linear(x, weight) + 1, max(tolerance_of(kernels, weight_format, 700), 1e-5))


def test_bfloat16_rounds_the_activations_of_long_prompts_only(kernels, pool):
    weight = random(64, 576, scale=0.1).bfloat16().float()
    matrix = PackedMatrix(kernels, pool, weight, format=Format.BFLOAT16)
    for num_rows in (1, 7, 8, 16):
        x = random(num_rows, 576, seed=num_rows)
        assert_near(linear(kernels, pool, matrix, x, 64, Then.STORE), F.linear(x, weight), 2e-5)
    for num_rows in (17, 40):
        x = random(num_rows, 576)
        error = (linear(kernels, pool, matrix, x, 64, Then.STORE) - F.linear(x, weight)).abs().max()
        of_rounding = (F.linear(x.bfloat16().float(), weight) - F.linear(x, weight)).abs().max()
        assert error <= 1.01 * of_rounding + 1e-5


def test_small_matrices_share_memory_that_outlives_none_of_them(kernels, pool):
    weights = [random(40, 24, seed=seed) for seed in range(6)]
    matrices = [PackedMatrix(kernels, pool, weight, format=Format.FLOAT32) for weight in weights]
    del matrices[::2]
    for weight in weights[::2]:
        matrices.append(PackedMatrix(kernels, pool, weight, format=Format.FLOAT32))
    x = random(3, 24)
    for matrix, weight in zip(matrices, [*weights[1::2], *weights[::2]], strict=True):
        assert_near(linear(kernels, pool, matrix, x, 40, Then.STORE), F.linear(x, weight), 2e-6)


@pytest.mark.parametrize("weight_format", Format)
@pytest.mark.parametrize("then", [Then.SILU_TIMES_UP, Then.GELU_TIMES_UP])
@pytest.mark.parametrize("inner", [64, 40, 3])
def test_gated_products_equal_those_of_pytorch(kernels, pool, weight_format, then, inner):
    weight = kept_exactly(random(2 * inner, 48, scale=0.2), weight_format)
    bias = random(2 * inner, seed=1)
    matrix = PackedMatrix(kernels, pool, weight, bias, format=weight_format, gated=True, exact=True)
    for num_rows in (1, 13, 32, 33):
        x = random(num_rows, 48, seed=num_rows)
        gate, up = F.linear(x, weight, bias).chunk(2, dim=-1)
        activated = F.silu(gate) if then is Then.SILU_TIMES_UP else F.gelu(gate, approximate="tanh")
        actual = linear(kernels, pool, matrix, x, inner, then)
        assert_near(actual, activated * up, max(tolerance_of(kernels, weight_format, num_rows), 3e-6))


def test_activations_hold_far_from_zero(kernels, pool):
    x = torch.tensor([[-1e4], [-200.0], [-90.0], [-20.0], [-1e-4], [0.0], [1e-4], [20.0], [90.0], [1e4]])
    matrix = PackedMatrix(kernels, pool, torch.ones(2, 1), format=Format.FLOAT32, gated=True)
    for then, function in ((Then.SILU_TIMES_UP, F.silu), (Then.GELU_TIMES_UP, lambda g: F.gelu(g, approximate="tanh"))):
        expected = function(x.double()) * x
        torch.testing.assert_close(linear(kernels, pool, matrix, x, 1, then).double(), expected, atol=1e-12, rtol=1e-5)


def test_products_are_added_and_capped_where_asked(kernels, pool):
    weight, x = random(40, 24), random(5, 24, seed=1)
    matrix = PackedMatrix(kernels, pool, weight, format=Format.FLOAT32)
    product = F.linear(x, weight)
    assert_near(linear(kernels, pool, matrix, x, 40, Then.ADD), 1 + product, 1e-6)
    assert_near(linear(kernels, pool, matrix, x, 40, Then.SOFT_CAP, 3.0), 3 * torch.tanh(product / 3), 1e-6)


@pytest.mark.parametrize("weight_format", Format)
def test_a_row_can_be_read_back(kernels, pool, weight_format):
    weight = random(70, 33).bfloat16().float()
    matrix = PackedMatrix(kernels, pool, weight, format=weight_format)
    largest = weight.abs().amax(dim=1)
    for row in (0, 31, 69):
        limit = {Format.INT8: 0.501 / 127, Format.INT4: 0.2}.get(weight_format, 0.0) * largest[row]
        assert (read_back(kernels, matrix, 70, 33)[row] - weight[row]).abs().max() <= limit


def test_weights_that_were_in_four_bits_before_come_back_as_they_were(kernels, pool):
    for seed, columns in enumerate((32, 576, 130, 1)):
        weight = kept_exactly(random(70, columns, seed=seed, scale=0.05), Format.INT4)
        matrix = PackedMatrix(kernels, pool, weight, format=Format.INT4)
        assert torch.equal(read_back(kernels, matrix, 70, columns), weight)


@pytest.mark.parametrize("num_steps", [9, 12, 14])
def test_four_bits_also_find_levels_of_which_not_all_are_in_use(kernels, pool, num_steps):
    weight = from_levels(random(70, 32, scale=0.05), num_steps)
    back = read_back(kernels, PackedMatrix(kernels, pool, weight, format=Format.INT4), 70, 32)
    assert (back - weight).abs().max() < 1e-3 * weight.abs().max()


def test_four_bits_lose_less_than_by_rounding_between_the_ends(kernels, pool):
    weight = random(70, 576, scale=0.05)
    rounded = kept_exactly(weight, Format.INT4)
    back = read_back(kernels, PackedMatrix(kernels, pool, weight, format=Format.INT4), 70, 576)
    assert (back - weight).norm() < 0.92 * (rounded - weight).norm()


def test_four_bits_hold_groups_without_a_range(kernels, pool):
    weight = torch.tensor([0.0, 1.0, -0.375, 3e-9, 6e4]).repeat_interleave(2)[:, None].repeat(1, 64)
    weight[1, 3] = 1e-9
    back = read_back(kernels, PackedMatrix(kernels, pool, weight, format=Format.INT4), 10, 64)
    assert (back - weight).abs().max() <= 5e-4 * weight.abs().max()
    assert torch.equal(back[2:6], weight[2:6]) and back[6:8].abs().max() < 1e-7


def test_four_bits_take_five_with_what_they_are_scaled_by(kernels, pool):
    matrix = PackedMatrix(kernels, pool, random(96, 64), format=Format.INT4)
    assert matrix.num_bytes == 96 * 64 * 5 // 8


@pytest.mark.parametrize("size", [1, 15, 16, 64, 576, 579])
def test_norm_equals_that_of_pytorch(kernels, size):
    x, weight = random(4, size), random(size, seed=1)
    assert_near(rms_norm(kernels, x, weight, 1e-5), F.rms_norm(x, (size,), weight, 1e-5), 1e-6)


@pytest.mark.parametrize("dim", [2, 8, 24, 64, 128])
def test_rotation_equals_that_of_the_layers(kernels, dim):
    x, angles = random(5, 3, dim), random(5, dim // 2, seed=1, scale=10)
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, dim=-1)
    expected = torch.cat([a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]], dim=-1)
    actual = x.clone()
    kernels.rotate(actual.data_ptr(), cos.data_ptr(), sin.data_ptr(), 5, 3, dim)
    assert_near(actual, expected, 1e-6)


class PagedScene:
    """Sequences scattered over a cache that is NaN wherever nobody wrote."""

    def __init__(
        self, kernels, pool, query_lens, seq_lens, *, block_size, heads, dim, dtype=torch.float32, by_head=False
    ):
        num_heads, num_kv_heads = heads
        num_blocks = sum(math.ceil(n / block_size) for n in seq_lens) + 3
        shuffled = iter(torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist())
        tables = [list(itertools.islice(shuffled, math.ceil(n / block_size))) for n in seq_lens]
        self.kernels, self.pool = kernels, pool
        self.k_cache, self.v_cache = (
            self._make_cache(num_blocks, block_size, num_kv_heads, dim, dtype, by_head) for _ in range(2)
        )
        self.queries = random(sum(query_lens), num_heads, dim, seed=1)
        num_decodes = len(list(itertools.takewhile(lambda n: n == 1, reversed(query_lens))))
        self.meta = AttentionMetadata.from_lists(
            query_lens, seq_lens, tables, block_size=block_size, num_decodes=num_decodes
        )
        everything = AttentionMetadata.from_lists(seq_lens, seq_lens, tables, block_size=block_size)
        self.keys, self.values = (random(sum(seq_lens), num_kv_heads, dim, seed=s) for s in (2, 3))
        store_kv(kernels, pool, self.keys, self.values, self.k_cache, self.v_cache, everything.slot_mapping)
        self.everything = everything

    @staticmethod
    def _make_cache(num_blocks, block_size, num_kv_heads, dim, dtype, by_head):
        num_bytes = row_bytes(dim, dtype)
        if by_head:
            cache = torch.full((num_blocks, num_kv_heads, block_size, num_bytes), NAN_BYTE, dtype=torch.uint8)
            return cache.view(dtype).transpose(1, 2)
        return torch.full((num_blocks, block_size, num_kv_heads, num_bytes), NAN_BYTE, dtype=torch.uint8).view(dtype)

    def attend(self, **options):
        return attend(self.kernels, self.pool, self.queries, self.k_cache, self.v_cache, self.meta, **options)

    def check(self, **options):
        """Against the reference over what the cache holds."""
        caches = (decode(cache, torch.float32).contiguous() for cache in (self.k_cache, self.v_cache))
        expected = ReferenceBackend().attend(self.queries, *caches, self.meta, AttentionParams(**options))
        assert_near(self.attend(**options), expected, KV_TOLERANCE[self.k_cache.dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=["fp32", "int8"])
@pytest.mark.parametrize("block_size", [1, 5, 16, 256])
def test_mixed_rows_attend_like_the_reference(kernels, pool, block_size, dtype):
    query_lens, seq_lens = [9, 4, 1, 150, 1, 1, 1], [9, 21, 33, 150, 1, 17, 300]
    scene = PagedScene(kernels, pool, query_lens, seq_lens, block_size=block_size, heads=(6, 2), dim=32, dtype=dtype)
    for window, soft_cap in ((None, None), (1, None), (7, 3.0), (20, None), (200, 3.0), (None, 3.0)):
        scene.check(scale=0.3, window=window, soft_cap=soft_cap)


@pytest.mark.parametrize("dtype", KV_DTYPES.values(), ids=KV_DTYPES)
def test_coarse_prompts_lose_no_more_than_the_rounding_to_bfloat16(kernels, pool, dtype):
    scene = PagedScene(kernels, pool, [9, 150, 1], [300, 150, 17], block_size=16, heads=(6, 2), dim=64, dtype=dtype)
    for window, soft_cap in ((None, None), (20, None), (None, 3.0)):
        options = {"scale": 0.1, "window": window, "soft_cap": soft_cap}
        assert_near(scene.attend(**options, coarse=True), scene.attend(**options), 0.01)


@pytest.mark.parametrize("dtype", KV_DTYPES.values(), ids=KV_DTYPES)
@pytest.mark.parametrize("dim", [8, 20, 64, 80, 128, 256])
def test_heads_of_any_number_and_size_attend_like_the_reference(kernels, pool, dim, dtype):
    for heads in ((1, 1), (3, 1), (9, 3), (4, 4), (7, 1)):
        scene = PagedScene(kernels, pool, [20, 1, 1], [50, 1, 140], block_size=16, heads=heads, dim=dim, dtype=dtype)
        scene.check(scale=dim**-0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=["fp32", "int8"])
def test_long_sequences_are_cut_and_put_together_again(kernels, pool, dtype):
    seq_lens = [1, 1500, 3, 700, 1499, 2, 650]
    scene = PagedScene(kernels, pool, [1] * 7, seq_lens, block_size=16, heads=(6, 2), dim=64, dtype=dtype)
    for _ in range(3):  # what one call leaves behind does not disturb the next
        scene.check(scale=0.125)
        scene.check(scale=0.125, window=400)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=["fp32", "int8"])
def test_keys_of_many_wide_heads_are_read_a_few_at_a_time(kernels, pool, dtype):
    scene = PagedScene(
        kernels, pool, [1, 1, 20, 1], [90, 1, 20, 47], block_size=16, heads=(16, 8), dim=256, dtype=dtype
    )
    scene.check(scale=0.0625)


def test_keys_may_lie_head_by_head(kernels, pool):
    for dtype in KV_DTYPES.values():
        scene = PagedScene(
            kernels, pool, [30, 1], [70, 90], block_size=16, heads=(6, 2), dim=64, by_head=True, dtype=dtype
        )
        scene.check(scale=0.125)


def test_keys_and_values_lie_where_their_slots_say(kernels, pool):
    for dtype in KV_DTYPES.values():
        scene = PagedScene(kernels, pool, [3, 5], [3, 5], block_size=4, heads=(2, 2), dim=24, dtype=dtype)
        for cache, stored in ((scene.k_cache, scene.keys), (scene.v_cache, scene.values)):
            found = cache.flatten(0, 1)[scene.everything.slot_mapping]
            torch.testing.assert_close(decode(found, torch.float32), decode(encode(stored, dtype), torch.float32))
            untouched = (cache.view(torch.uint8) == NAN_BYTE).all(dim=-1).all(dim=-1)
            assert int(untouched.sum()) == cache.shape[0] * 4 - 8


@pytest.mark.parametrize("dim", [24, 64])
def test_eight_bits_keep_each_number_within_half_a_step_of_its_heads_largest(kernels, pool, dim):
    """Also of heads that are zero, or as good as zero."""
    x = random(40, 2, dim) * torch.logspace(-44, 30, 40)[:, None, None]
    x[20] = 0.0
    caches = [PagedScene._make_cache(10, 4, 2, dim, torch.int8, False) for _ in range(2)]
    store_kv(kernels, pool, x, -x, *caches, torch.arange(40))
    for cache, stored in zip(caches, (x, -x), strict=True):
        kept = decode(cache.flatten(0, 1), torch.float32)
        assert ((kept - stored).abs() <= 0.501 / 127 * stored.abs().amax(-1, keepdim=True) + 1e-27).all()


@pytest.mark.parametrize("num_queries", [1, 60])
def test_eight_bits_lose_no_more_than_their_rounding(kernels, pool, num_queries):
    """Keys and values at random: a hundredth, as of each number."""
    seq_lens = [300, 80]
    outs = {}
    for dtype in (torch.float32, torch.int8):
        scene = PagedScene(kernels, pool, [num_queries] * 2, seq_lens, block_size=16, heads=(6, 2), dim=64, dtype=dtype)
        outs[dtype] = scene.attend(scale=0.125)
    error = (outs[torch.int8] - outs[torch.float32]).norm() / outs[torch.float32].norm()
    assert 1e-4 < error < 0.012


def test_a_key_that_outweighs_all_others_is_attended_to_alone(kernels, pool):
    """Weights far below the largest one become none, and the softmax still sums to one."""
    scene = PagedScene(kernels, pool, [1], [200], block_size=16, heads=(2, 1), dim=64, dtype=torch.int8)
    scene.check(scale=20.0)


def test_more_threads_than_pieces_of_work_leave_none_of_it_undone(kernels):
    """Threads that find nothing to begin with take from the others, and may be late for the next product."""
    own = Pool(kernels, 7)
    x = random(3, 64)
    for size in (40, 100, 500):
        weight = random(size, 64, seed=size)
        matrix = PackedMatrix(kernels, own, weight, format=Format.FLOAT32)
        for _ in range(50):
            assert_near(linear(kernels, own, matrix, x, size, Then.STORE), F.linear(x, weight), 1e-5)


def test_pools_of_one_process_do_not_disturb_each_other(kernels):
    """Threads that share nothing but the library, as ranks in one process do."""
    weight, x = random(96, 64), random(40, 64, seed=1)
    expected = F.linear(x, weight)
    failures = []

    def work():
        own = Pool(kernels, 2)
        matrix = PackedMatrix(kernels, own, weight, format=Format.FLOAT32)
        for _ in range(200):
            if not torch.allclose(linear(kernels, own, matrix, x, 96, Then.STORE), expected, atol=1e-4):
                failures.append(1)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
