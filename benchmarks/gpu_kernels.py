"""The GPU check's kernels: each equal to PyTorch, then each beside what the card can do at most."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_scene import DEVICE, Ceilings, has_fp8, make_scene, seconds_of, timed
from workers.attention import AttentionNeeds, AttentionParams, choose_backend
from workers.attention.reference import ReferenceBackend
from workers.attention.triton_paged import TritonPagedBackend
from workers.layers.ops import LayerOps, TritonOps
from workers.sampler import DrawnRows, draw_with_torch, draw_with_triton

Row = tuple[object, ...]
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
MIXED = {"query_lens": [9, 3, 300, 64, 1, 1, 1, 1], "seq_lens": [9, 21, 1000, 64, 1, 17, 3000, 20000], "num_decodes": 4}

AttentionCase = tuple[int, tuple[int, int], int, torch.dtype, int | None, float | None]
"""Block size, (query heads, key heads), head size, type, window, soft cap."""

ATTENTION_CASES: list[AttentionCase] = [
    (16, (32, 8), 128, BF16, None, None),
    (32, (16, 16), 64, BF16, None, None),
    (64, (32, 8), 128, BF16, None, None),
    (128, (32, 8), 128, BF16, None, None),
    (256, (32, 8), 128, BF16, None, None),
    (16, (9, 3), 64, BF16, None, None),
    (256, (14, 2), 64, BF16, None, None),
    (64, (8, 1), 128, BF16, None, None),
    (64, (64, 8), 128, BF16, None, None),
    (16, (8, 4), 256, BF16, 512, None),
    (64, (8, 4), 256, BF16, None, 50.0),
    (256, (16, 8), 256, BF16, 1024, 50.0),
    (48, (6, 2), 80, BF16, 100, None),
    (64, (32, 8), 128, torch.float16, None, None),
    (64, (4, 2), 64, torch.float32, None, None),
]
FP8_CASES: list[AttentionCase] = [
    (16, (32, 8), 128, BF16, None, None),
    (64, (32, 8), 128, BF16, None, None),
    (256, (32, 8), 128, BF16, 512, None),
    (64, (14, 2), 64, BF16, None, None),
    (64, (8, 4), 256, BF16, None, 50.0),
    (64, (64, 8), 128, torch.float16, None, None),
]
"""Over a cache in fp8."""
DECODE_SHAPES = [(1, 8192), (1, 131072), (8, 16384), (64, 4096), (256, 1024)]
"""Sequences, and the length of each."""
PREFILL_SHAPES = [(1, 8192, 8192), (4, 2048, 2048), (16, 512, 512), (1, 2048, 16384)]
"""Sequences, queries and length of each."""
CHECKED_TOKENS, LAYER_TOKENS = 77, (64, 16384)
CHECKED_DRAWS, SAMPLED_ROWS, VOCAB_SIZE = 256, (1, 64, 256), 151936


def check_attention() -> Iterator[Row]:
    cases = [(case, None) for case in ATTENTION_CASES] + [(case, FP8) for case in fp8_cases()]
    for (block_size, heads, head_dim, dtype, window, soft_cap), cache_dtype in cases:
        scene = make_scene(
            **MIXED,  # type: ignore[arg-type]
            block_size=block_size,
            heads=heads,
            head_dim=head_dim,
            dtype=dtype,
            cache_dtype=cache_dtype,
            window=window,
            soft_cap=soft_cap,
        )
        error = scene.error(TritonPagedBackend())
        kept = "" if cache_dtype is None else " over fp8"
        what = f"{block_size} / {heads[0]}:{heads[1]} / {head_dim} / {str(dtype)[6:]}{kept} / {window} / {soft_cap}"
        yield what, f"{error:.1e}", "ok" if error < TOLERANCE[dtype] else "WRONG"
    yield from _check_store()


def fp8_cases() -> list[AttentionCase]:
    """None where the card has no fp8."""
    return FP8_CASES if has_fp8(DEVICE) else []


def _check_store() -> Iterator[Row]:
    """Keys and values go to the same places, in the same bits, as PyTorch writes them; in fp8 some are too large."""
    k, v = (torch.randn(300, 8, 128, device=DEVICE, dtype=BF16) * 10 for _ in range(2))
    slots = torch.randperm(1024, device=DEVICE)[:300]
    for dtype in (BF16, FP8) if has_fp8(DEVICE) else (BF16,):
        params = AttentionParams(scale=1.0, **({"k_scale": 0.05, "v_scale": 1.5} if dtype == FP8 else {}))
        caches = []
        for backend in (TritonPagedBackend(), ReferenceBackend()):
            pair = [torch.zeros(16, 64, 8, 128, device=DEVICE, dtype=dtype) for _ in range(2)]
            backend.store_kv(k, v, pair[0], pair[1], slots, params)
            caches.append(torch.stack([cache.view(torch.uint8) for cache in pair]))
        differing = int((caches[0] != caches[1]).sum())
        yield f"storing in {str(dtype)[6:]}", f"{differing} bytes differ", "ok" if differing == 0 else "WRONG"


def check_backends() -> Iterator[Row]:
    """Which backends this machine offers, by their own probes."""
    for block_size, cache_dtype in ((64, BF16), (256, BF16), (64, FP8)):
        needs = AttentionNeeds(device=DEVICE, dtype=BF16, cache_dtype=cache_dtype, head_dim=128, block_size=block_size)
        for name in ("fa3", "fa4", "flash_attn", "triton"):
            try:
                choose_backend(name, needs)
                says = "available"
            except ValueError as error:
                says = str(error).partition("here: ")[2]
            yield name, block_size, str(cache_dtype)[6:], says


def check_layers() -> Iterator[Row]:
    """Fused operations against PyTorch's, in float32 on the same numbers."""
    fused, plain = TritonOps(), LayerOps()
    x, residual, weight = (
        torch.randn(*shape, device=DEVICE, dtype=BF16)
        for shape in ((CHECKED_TOKENS, 4096), (CHECKED_TOKENS, 4096), (4096,))
    )
    wide, exact_sum = torch.randn(CHECKED_TOKENS, 2 * 14336, device=DEVICE, dtype=BF16), (x + residual).float()
    normed = fused.add_rms_norm(x, residual.clone(), weight, 1e-6)
    yield _compared("add and norm", normed, plain.rms_norm(exact_sum, weight.float(), 1e-6))
    for activation in ("silu", "gelu_tanh"):
        yield _compared(activation, fused.gated(wide, activation), plain.gated(wide.float(), activation))
    qkv = torch.randn(CHECKED_TOKENS, 48, 128, device=DEVICE, dtype=BF16)
    angles = torch.randn(CHECKED_TOKENS, 1, 64, device=DEVICE)
    rotation = angles.cos().to(BF16), angles.sin().to(BF16)
    exact = rotation[0].float(), rotation[1].float()
    for weights in ({}, {"q_weight": weight[:128], "k_weight": weight[128:256]}):
        found = torch.cat(fused.rotate(qkv.clone(), 32, 8, rotation, eps=1e-6, **weights), dim=1)
        floats = {name: value.float() for name, value in weights.items()}
        expected = torch.cat(plain.rotate(qkv.float(), 32, 8, exact, eps=1e-6, **floats), dim=1)
        yield _compared("norm and rotate" if weights else "rotate", found, expected)
    yield from _check_sampler()


def _compared(what: str, found: torch.Tensor, expected: torch.Tensor) -> Row:
    error = float((found.float() - expected).norm() / expected.norm())
    return what, f"{error:.1e}", "ok" if error < TOLERANCE[BF16] else "WRONG"


def _check_sampler() -> Iterator[Row]:
    logits = torch.randn(CHECKED_DRAWS, VOCAB_SIZE, device=DEVICE) * 4
    for filters in (False, True):
        asked = drawn_rows(CHECKED_DRAWS, filters=filters)
        found, expected = (torch.empty(CHECKED_DRAWS, dtype=torch.int64, device=DEVICE) for _ in range(2))
        draw_with_torch(expected, logits, asked)
        draw_with_triton(found, logits, asked)
        differing = int((found != expected).sum())
        yield f"draws, filters {filters}", f"{differing} of {CHECKED_DRAWS} differ", "ok" if differing <= 2 else "WRONG"


def drawn_rows(num_rows: int, *, filters: bool) -> DrawnRows:
    asked = {"top_k": 50, "top_p": 0.9, "min_p": 0.02} if filters else {}
    return DrawnRows.alike(num_rows, DEVICE, temperature=0.8, **asked)  # type: ignore[arg-type]


def time_decode(ceilings: Ceilings) -> Iterator[Row]:
    """Decode attention alone, heads of Llama-3.1-8B: bytes of keys and values over time, beside the copy's."""
    kinds = [(16, BF16), (64, BF16), (256, BF16), *([(64, FP8)] if has_fp8(DEVICE) else [])]
    for block_size, dtype in kinds:
        for num_seqs, length in DECODE_SHAPES:
            scene = make_scene(
                [1] * num_seqs,
                [length] * num_seqs,
                num_decodes=num_seqs,
                block_size=block_size,
                heads=(32, 8),
                head_dim=128,
                cache_dtype=dtype,
                poison=False,
            )
            backend = TritonPagedBackend()
            seconds = seconds_of(lambda scene=scene, backend=backend: scene.attend(backend))  # type: ignore[misc]
            rate = num_seqs * length * 8 * 128 * 2 * dtype.itemsize / seconds
            share = rate / ceilings.copy_bytes_per_s
            what = f"{num_seqs} x {length}, blocks of {block_size}, {str(dtype)[6:]}"
            yield what, seconds * 1e6, rate / 1e12, share


def time_prefill(ceilings: Ceilings) -> Iterator[Row]:
    """Prefill attention alone, beside the fastest of torch's on contiguous keys where there is one."""
    kinds = [(16, BF16), (256, BF16), *([(256, FP8)] if has_fp8(DEVICE) else [])]
    for num_seqs, num_queries, length in PREFILL_SHAPES:
        for block_size, dtype in kinds:
            scene = make_scene(
                [num_queries] * num_seqs,
                [length] * num_seqs,
                num_decodes=0,
                block_size=block_size,
                heads=(32, 8),
                head_dim=128,
                cache_dtype=dtype,
                poison=False,
            )
            backend = TritonPagedBackend()
            seconds = seconds_of(lambda scene=scene, backend=backend: scene.attend(backend))  # type: ignore[misc]
            pairs = num_seqs * num_queries * (length - num_queries + (num_queries + 1) / 2)
            flops = 4 * pairs * 32 * 128
            best = _sdpa_seconds(num_seqs, num_queries) if num_queries == length else None
            yield (
                f"{num_seqs} x {num_queries} of {length}, blocks of {block_size}, {str(dtype)[6:]}",
                seconds * 1e6,
                flops / seconds / 1e12,
                flops / seconds / ceilings.bf16_flops,
                "" if best is None else f"{best / seconds:.2f}",
            )


def _sdpa_seconds(num_seqs: int, length: int) -> float | None:
    q = torch.randn(num_seqs, 32, length, 128, device=DEVICE, dtype=BF16)
    k, v = (torch.randn(num_seqs, 8, length, 128, device=DEVICE, dtype=BF16) for _ in range(2))
    found = []
    for kernel in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        try:
            with sdpa_kernel(kernel):
                found.append(
                    seconds_of(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
                )
        except RuntimeError:  # this build lacks it
            continue
    return min(found, default=None)


def time_layers(ceilings: Ceilings) -> Iterator[Row]:
    fused = TritonOps()
    for num_tokens in LAYER_TOKENS:
        x, residual = (torch.randn(num_tokens, 4096, device=DEVICE, dtype=BF16) for _ in range(2))
        weight = torch.ones(4096, device=DEVICE, dtype=BF16)
        wide = torch.randn(num_tokens, 2 * 14336, device=DEVICE, dtype=BF16)
        qkv = torch.randn(num_tokens, 48, 128, device=DEVICE, dtype=BF16)
        rotation = (torch.ones(num_tokens, 1, 64, device=DEVICE, dtype=BF16),) * 2
        runs = {
            "add and norm": (lambda: fused.add_rms_norm(x, residual, weight, 1e-6), 4 * x.nbytes),  # noqa: B023
            "silu x up": (lambda: fused.gated(wide, "silu"), 1.5 * wide.nbytes),  # noqa: B023
            "rotate": (lambda: fused.rotate(qkv, 32, 8, rotation), 2 * qkv.nbytes * 40 / 48),  # noqa: B023
        }
        for name, (run, num_bytes) in runs.items():
            seconds = seconds_of(run)
            rate = num_bytes / seconds
            yield f"{name}, {num_tokens} tokens", seconds * 1e6, rate / 1e12, rate / ceilings.copy_bytes_per_s


def time_sampler() -> Iterator[Row]:
    for num_rows in SAMPLED_ROWS:
        logits = torch.randn(num_rows, VOCAB_SIZE, device=DEVICE) * 4
        tokens = torch.empty(num_rows, dtype=torch.int64, device=DEVICE)
        for filters in (False, True):
            asked = drawn_rows(num_rows, filters=filters)
            own = seconds_of(lambda: draw_with_triton(tokens, logits, asked), repeats=3)  # noqa: B023
            draw_with_torch(tokens, logits, asked)
            plain = timed(lambda: draw_with_torch(tokens, logits, asked))  # noqa: B023
            yield f"{num_rows} rows, filters {filters}", own * 1e6, plain * 1e6
