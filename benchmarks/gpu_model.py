"""The GPU check's whole models: random weights of real shapes, single decode steps, then a whole engine."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.gpu_scene import DEVICE, Ceilings, has_fp8
from benchmarks.gpu_steps import GREEDY, admit, decode_plan, device_seconds, run_steps
from cluster.local import LocalEngine
from configs import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, WorkerConfig
from configs.matrices import weight_bytes
from configs.model_spec import ModelSpec
from configs.schema import GIB, CacheDtype
from scheduler.output import StepPlan
from scheduler.sampling_params import SamplingParams
from workers.model_runner import ModelRunner
from workers.parallel import SingleProcessGroup
from workers.worker import Worker

Row = tuple[object, ...]

_COMMON = {"rms_norm_eps": 1e-6, "torch_dtype": "bfloat16", "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2}
SHAPES: dict[str, dict[str, object]] = {
    "Qwen3-0.6B": _COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    "Llama-3.1-8B": _COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
    },
}
SHARE_USED = (0.8, 1.02)
"""Less would be waste; more is what the driver keeps for itself."""
DRAWN = replace(GREEDY, temperature=0.8, top_k=50, top_p=0.9, min_p=0.01)
REQUESTS = {
    "greedy": GREEDY,
    "drawn": DRAWN,
    "everything asked for": replace(
        DRAWN,
        logprobs=3,
        prompt_logprobs=3,
        min_tokens=2,
        stop_token_ids=(7,),
        logit_bias={5: 1.0},
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
    ),
}


def make_spec(name: str, **changes: object) -> ModelSpec:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[name] | changes))
        return ModelSpec.from_directory(Path(folder))


def make_config(
    *,
    max_num_seqs: int,
    num_blocks: int | None = None,
    block_size: int = 64,
    cache_dtype: CacheDtype = "auto",
    utilization: float = 0.9,
    graphs: bool = True,
    **scheduler: object,
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(path="random", load_format="random", dtype="bfloat16", max_model_len=4096),
        cache=CacheConfig(
            block_size=block_size, num_blocks=num_blocks, dtype=cache_dtype, gpu_memory_utilization=utilization
        ),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, **scheduler),  # type: ignore[arg-type]
        worker=WorkerConfig(device="cuda", attention_backend="triton", cuda_graphs=graphs),
    )


def start_worker(spec: ModelSpec, config: EngineConfig) -> Worker:
    worker = Worker(config, spec, SingleProcessGroup(DEVICE))
    worker.load_model()
    worker.allocate_cache(worker.measure_num_blocks())
    return worker


def fill_cache(runner: ModelRunner) -> None:
    for cache in (*runner.kv.k, *runner.kv.v):
        cache.copy_(torch.randn(cache.shape[1:], device=cache.device))


def check_graphs() -> Iterator[Row]:
    """The same greedy tokens with captured graphs, without them, and in step: a small model, odd numbers of rows."""
    spec = make_spec("Qwen3-0.6B", num_hidden_layers=4)
    cache_dtypes: tuple[CacheDtype, ...] = ("auto", "fp8") if has_fp8(DEVICE) else ("auto",)
    for cache_dtype in cache_dtypes:
        graphed, eager = (
            start_worker(
                spec, make_config(max_num_seqs=13, num_blocks=200, cache_dtype=cache_dtype, graphs=graphs)
            ).runner
            for graphs in (True, False)
        )
        for epoch, num_seqs in enumerate((1, 2, 4, 8, 13, 3, 11)):
            found, expected = (run_steps(runner, num_seqs, 100, 20, epoch)[0] for runner in (graphed, eager))
            same = sum(a == b for x, y in zip(found, expected, strict=True) for a, b in zip(x, y, strict=True))
            share = same / (num_seqs * 21)
            # A padded step's matrix products may sum in another order: ties of random weights then fall differently.
            exact = num_seqs in (1, 2, 4, 8, 13)
            what = f"{num_seqs} rows, 20 steps{', KV in fp8' if cache_dtype == 'fp8' else ''}"
            yield what, f"{share:.1%} equal", "ok" if share == 1.0 or not exact else "WRONG"


def check_memory() -> Iterator[Row]:
    """Whether what the largest steps and all graphs take beside the cache stays within the share that was promised."""
    utilization, num_seqs = 0.3, 256
    spec = make_spec("Qwen3-0.6B")
    free_before, total = torch.cuda.mem_get_info(DEVICE)
    worker = start_worker(spec, make_config(max_num_seqs=num_seqs, utilization=utilization))
    run_steps(worker.runner, num_seqs, 100, 3, 0)
    worker.profile_step()
    torch.cuda.synchronize()
    used, share = free_before - torch.cuda.mem_get_info(DEVICE)[0], utilization * total
    verdict = "ok" if SHARE_USED[0] < used / share < SHARE_USED[1] else "WRONG"
    yield f"{num_seqs} rows, graphs, {worker.runner.kv.num_blocks} blocks", used / GIB, used / share, verdict
    worker.close()


def check_waiting() -> Iterator[Row]:
    """Torch itself raises where launching a step would wait for the device, whatever a request asks for."""
    spec = make_spec("Qwen3-0.6B", num_hidden_layers=2)
    for graphs in (True, False):
        runner = start_worker(spec, make_config(max_num_seqs=4, num_blocks=40, graphs=graphs)).runner
        for epoch, (kind, params) in enumerate(REQUESTS.items()):
            for warm in (True, False):  # compiling may wait
                tried = 2 * epoch + (not warm)
                first = admit(3, 100, runner.kv.block_size, 8, tried, params=params, num_computed=20)
                plans = [first, *(decode_plan(step, 3, tried) for step in (1, 2))]
                verdict = _launched_without_waiting(runner, plans, strict=not warm)
            yield f"{kind}, {'graphs' if graphs else 'eager'}", verdict, "ok" if verdict == "never" else "WRONG"


def _launched_without_waiting(runner: ModelRunner, plans: Sequence[StepPlan], *, strict: bool) -> str:
    pending = []
    torch.cuda.set_sync_debug_mode("error" if strict else "default")
    try:
        for plan in plans:
            pending.append(runner.launch(plan))
    except RuntimeError as error:
        return f"step {len(pending)}: {str(error).splitlines()[0]}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for step in pending:
        runner.collect(step)
    return "never"


def time_steps(
    name: str, ceilings: Ceilings, *, batches: Sequence[int] = (1, 64), with_fp8: bool = False
) -> Iterator[Row]:
    """A decode step at 1024 cached tokens: against reading all weights and keys once at the speed of a copy."""
    spec = make_spec(name)
    kinds: list[tuple[bool, CacheDtype]] = [(True, "auto"), (False, "auto")]
    if with_fp8 and has_fp8(DEVICE):
        kinds.append((True, "fp8"))
    for graphs, cache_dtype in kinds:
        config = make_config(
            max_num_seqs=max(batches), num_blocks=max(batches) * 18, cache_dtype=cache_dtype, graphs=graphs
        )
        worker = start_worker(spec, config)
        fill_cache(worker.runner)
        for epoch, num_seqs in enumerate(batches):
            what = f"{name}, batch {num_seqs}, {'graph' if graphs else 'eager'}"
            if cache_dtype == "fp8":
                what += ", KV in fp8"
            yield what, *_time_step(worker.runner, spec, num_seqs, epoch, cache_dtype, ceilings)
        worker.close()
        del worker
        torch.cuda.empty_cache()


def _time_step(
    runner: ModelRunner, spec: ModelSpec, num_seqs: int, epoch: int, cache_dtype: CacheDtype, ceilings: Ceilings
) -> tuple[float, float, float, float, float]:
    length, num_steps = 1024, 60
    _, seconds = run_steps(runner, num_seqs, length, num_steps, epoch)
    busy = device_seconds(runner, num_seqs, num_steps + 1, epoch)
    weights = weight_bytes(spec, "bfloat16")
    if not spec.tie_word_embeddings:  # rows of the embedding are looked up, not read through
        weights -= spec.vocab_size * spec.hidden_size * 2
    kept = spec.kv_bytes_per_token("bfloat16" if cache_dtype == "auto" else cache_dtype)
    floor = (weights + num_seqs * length * kept) / ceilings.copy_bytes_per_s
    return seconds * 1e3, busy * 1e3, floor * 1e3, busy / floor, max(0.0, 1.0 - busy / seconds)


def time_engine(num_seqs: int = 256) -> Iterator[Row]:
    """256 requests of 100 to 1024 tokens in and out, Qwen3-0.6B's shape, through scheduler and runner."""
    spec = make_spec("Qwen3-0.6B")
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 10_000) for _ in range(rng.randint(100, 1024))] for _ in range(num_seqs)]
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=rng.randint(100, 1024), seed=i)
        for i in range(num_seqs)
    ]
    config = make_config(max_num_seqs=num_seqs, max_num_batched_tokens=16384, max_prefill_chunk=4096)
    with LocalEngine(config, spec) as engine:
        others = [prompt[::-1] for prompt in prompts[:8]]  # whose blocks none of the prompts finds in the cache
        engine.generate(others, SamplingParams(temperature=0.6, max_tokens=16, ignore_eos=True))
        torch.cuda.synchronize()
        started = time.perf_counter()
        completions = engine.generate(prompts, params)
        seconds = time.perf_counter() - started
        num_out = sum(len(completion.token_ids) for completion in completions)
        num_in = sum(map(len, prompts))
        yield f"{num_seqs} requests", num_in, num_out, seconds, num_out / seconds
