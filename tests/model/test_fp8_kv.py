"""A KV cache in fp8: whole models over it, and the scales that a checkpoint brings for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cluster.local import LocalEngine
from configs import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, WorkerConfig
from configs.model_spec import ModelSpec
from scheduler.sampling_params import SamplingParams
from tests.support.quantized_runs import NUM_TOKENS, TOKENS, Checkpoints
from tests.support.thread_group import run_ranks
from workers.attention import AttentionMetadata
from workers.attention.reference import ReferenceBackend
from workers.kv_cache import KVCache
from workers.layers.attention import Attention
from workers.models import build_model
from workers.parallel import ParallelGroup, SingleProcessGroup
from workers.weights import load_weights

pytestmark = pytest.mark.usefixtures("one_thread")

FP8 = torch.float8_e4m3fn
LAYER = "model.layers.{}.self_attn."


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("quantised"))


def with_tensors(directory: Path, target: Path, more: dict[str, Tensor]) -> Path:
    save_file(load_file(directory / "model.safetensors") | more, target / "model.safetensors")
    (target / "config.json").write_bytes((directory / "config.json").read_bytes())
    return target


def load(directory: Path, group: ParallelGroup | None = None):
    spec = ModelSpec.from_directory(directory)
    model = build_model(spec, group or SingleProcessGroup(), ReferenceBackend(), torch.float32, "cpu")
    load_weights(model, spec, kv_scales=True)
    return model, spec


def scales_of(model) -> list[tuple[float, float]]:
    layers = [module.params for module in model.modules() if isinstance(module, Attention)]
    return [(params.k_scale, params.v_scale) for params in layers]


@pytest.mark.parametrize(
    ("k_name", "v_name"),
    [
        ("k_scale", "v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
def test_every_rank_takes_the_scales_that_the_checkpoint_brings(
    k_name: str, v_name: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    scales = {LAYER.format(1) + k_name: torch.tensor(0.5), LAYER.format(1) + v_name: torch.tensor([0.25])}
    directory = with_tensors(checkpoint("ct-channel")[0], tmp_path, scales)
    for found in run_ranks(2, lambda group: scales_of(load(directory, group)[0])):
        assert found == [(1.0, 1.0), (0.5, 0.25), (1.0, 1.0)]


def test_one_scale_may_serve_keys_and_values(checkpoint: Checkpoints, tmp_path: Path) -> None:
    directory = with_tensors(
        checkpoint("fp8-tensor")[0], tmp_path, {LAYER.format(0) + "kv_scale": torch.tensor(2.0).bfloat16()}
    )
    assert scales_of(load(directory)[0]) == [(2.0, 2.0), (1.0, 1.0), (1.0, 1.0)]


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(4), r"k_scale has shape \[4\]; .* one scale per layer: leave cache\.dtype out"),
        (torch.tensor(0.0), "k_scale is 0.0, which is no scale"),
        (torch.tensor(torch.nan), "k_scale is nan, which is no scale"),
    ],
)
def test_a_scale_that_cannot_be_used_is_refused(
    scale: Tensor, message: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    directory = with_tensors(checkpoint("ct-channel")[0], tmp_path, {LAYER.format(0) + "k_scale": scale})
    with pytest.raises(ValueError, match=message):
        load(directory)


@torch.no_grad()
def logits_over_fp8(directory: Path) -> Tensor:
    """Of the last half of the tokens, whose keys are read out of the cache."""
    model, spec = load(directory)
    kv = KVCache.allocate(
        num_layers=spec.num_layers,
        num_blocks=3,
        block_size=16,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=FP8,
        device="cpu",
    )
    for start, end in ((0, NUM_TOKENS // 2), (NUM_TOKENS // 2, NUM_TOKENS)):
        meta = AttentionMetadata.from_lists([end - start], [end], [[0, 1, 2]], block_size=16)
        hidden = model(TOKENS[start:end], torch.arange(start, end), kv, meta)
    return model.compute_logits(hidden)


def test_logits_over_fp8_are_near_the_exact_ones_and_scales_keep_large_keys_apart(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    directory, expected = checkpoint("ct-channel")
    expected = expected[NUM_TOKENS // 2 :]

    def distance(directory: Path) -> float:
        return float((logits_over_fp8(directory) - expected).square().mean().sqrt() / expected.std())

    names = [LAYER.format(layer) + kind for layer in range(3) for kind in ("k_scale", "v_scale")]
    # Scales so small that most numbers saturate, and so large that most become zero, must show.
    for kind, scale in (("fit", 0.02), ("saturates", 1e-5), ("vanishes", 1e5)):
        (tmp_path / kind).mkdir()
        with_tensors(directory, tmp_path / kind, {name: torch.tensor(scale) for name in names})
    assert distance(directory) < 0.1
    assert distance(tmp_path / "fit") < 0.1
    assert distance(tmp_path / "saturates") > 0.3
    assert distance(tmp_path / "vanishes") > 0.3


def test_an_engine_whose_cache_is_fp8_generates(checkpoint: Checkpoints) -> None:
    directory, _ = checkpoint("ct-channel")
    spec = ModelSpec.from_directory(directory)
    config = EngineConfig(
        model=ModelConfig(path=str(directory)),
        cache=CacheConfig(block_size=16, num_blocks=20),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_prefill_chunk=16),
        worker=WorkerConfig(num_threads=1, cpu_kernels="pytorch"),
    )
    prompts = [TOKENS[:20].tolist(), TOKENS[5:9].tolist()]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with LocalEngine(config, spec) as exact:
        expected = [completion.token_ids[0] for completion in exact.generate(prompts, params)]
    with LocalEngine(replace(config, cache=replace(config.cache, dtype="fp8")), spec) as engine:
        completions = engine.generate(prompts, params)
    assert [completion.token_ids[0] for completion in completions] == expected
    assert [len(completion.token_ids) for completion in completions] == [6, 6]
