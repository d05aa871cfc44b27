"""What one step of a model costs on this CPU: the C++ kernels in each weight format, beside PyTorch.

    python -m benchmarks.kernels_cpu [--num-threads 2] [--seconds 1]

The model has SmolLM2-135M's shape and random weights. A step is `forward` and the logits of each sequence's last
token. All ways are timed in turn, case by case, and the quickest of many rounds counts: what else the machine does then
falls on all of them; with `--cpu-time --num-threads 1` it counts for little. Before and after it is measured what the
machine itself can do, because the two cores of a virtual machine may be one real core at times.
"""

from __future__ import annotations

import argparse
import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.report import heading, markdown_table
from configs.model_spec import ModelSpec
from configs.rope_spec import RopeSpec
from workers.attention.base import AttentionMetadata
from workers.attention.reference import ReferenceBackend
from workers.cpu_decoder import CpuDecoder
from workers.cpu_packing import WeightFormat
from workers.kernels.cpu.library import CpuKernels, Pool, load_kernels
from workers.kv_cache import KVCache
from workers.models import CausalLM, build_model
from workers.parallel import SingleProcessGroup

BLOCK_SIZE = 64
BATCH_SIZES = (1, 8, 32, 64)
CONTEXT = 300  # unless another is asked for
FORMATS: dict[str, tuple[WeightFormat, torch.dtype]] = {
    "fp32": ("float32", torch.float32),
    "bf16": ("bfloat16", torch.bfloat16),
    "int8, KV bf16": ("int8", torch.bfloat16),
    "int8, KV int8": ("int8", torch.int8),
    "int4, KV int8": ("int4", torch.int8),
}


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    num_seqs: int
    num_queries: int
    context: int

    @property
    def num_tokens(self) -> int:
        return self.num_seqs * self.num_queries

    @property
    def num_blocks(self) -> int:
        """Of one sequence."""
        return -(-self.context // BLOCK_SIZE)


def make_cases(context: int) -> tuple[Case, ...]:
    return (
        *(Case(f"decode, batch {n}", n, 1, context) for n in BATCH_SIZES),
        Case("prefill 512", 1, 512, 512),
        Case("prefill 4 x 128", 4, 128, 128),
    )


CASES = make_cases(CONTEXT)


def smollm2_spec() -> ModelSpec:
    return ModelSpec(
        directory=Path(),
        architecture="LlamaForCausalLM",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_model_len=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        eos_token_ids=(2,),
        bos_token_id=1,
        dtype="float32",
        activation="silu",
        attention_bias=False,
        attention_output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        rope=RopeSpec(theta=1e5),
        local_rope=None,
        windows=(None,) * 30,
        attention_scale=64**-0.5,
        attention_soft_cap=None,
        logit_soft_cap=None,
        embedding_scale=None,
        norm_plus_one=False,
        post_norms=False,
    )


def random_model(spec: ModelSpec) -> CausalLM:
    """Weights that no format keeps exactly, at the scale of trained ones."""
    model = build_model(spec, SingleProcessGroup(), ReferenceBackend(), torch.float32, "cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.fill_(1.0) if parameter.dim() == 1 else parameter.data.normal_(0.0, 0.04, generator=generator)
    return model


def make_cache(spec: ModelSpec, dtype: torch.dtype, cases: Sequence[Case] = CASES) -> KVCache:
    return KVCache.allocate(
        num_layers=spec.num_layers,
        num_blocks=max(case.num_seqs * case.num_blocks for case in cases),
        block_size=BLOCK_SIZE,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=dtype,
        device="cpu",
    )


def step_of(case: Case, model: CausalLM | CpuDecoder, cache: KVCache) -> Callable[[], object]:
    tables = [list(range(s * case.num_blocks, (s + 1) * case.num_blocks)) for s in range(case.num_seqs)]
    meta = AttentionMetadata.from_lists(
        [case.num_queries] * case.num_seqs,
        [case.context] * case.num_seqs,
        tables,
        block_size=BLOCK_SIZE,
        num_decodes=case.num_seqs if case.num_queries == 1 else 0,
    )
    token_ids = torch.randint(0, 49152, (case.num_tokens,), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(case.context - case.num_queries, case.context).repeat(case.num_seqs)
    last = torch.arange(1, case.num_seqs + 1) * case.num_queries - 1

    def step() -> Tensor:
        return model.compute_logits(model(token_ids, positions, cache, meta)[last])

    return step


Clock = Callable[[], float]


def quickest_in_turn(steps: dict[str, Callable[[], object]], seconds: float, clock: Clock) -> dict[str, float]:
    """Milliseconds of the quickest of at least three rounds, `seconds` per way."""
    best = dict.fromkeys(steps, float("inf"))
    for step in steps.values():
        step()
    deadline, rounds = time.perf_counter() + seconds * len(steps), 0
    while rounds < 3 or time.perf_counter() < deadline:
        for name, step in steps.items():
            started = clock()
            step()
            best[name] = min(best[name], 1e3 * (clock() - started))
        rounds += 1
    return best


def calibrate(kernels: CpuKernels, num_threads: int, clock: Clock) -> tuple[float, float]:
    """(GFLOP/s in fp32, GB/s read from memory), the best of some tries."""
    pool = Pool(kernels, num_threads)
    region = mmap.mmap(-1, 256 << 20)  # in huge pages, as the weights are
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(region, dtype=torch.float32).fill_(1.0)
    flops = bandwidth = 0.0
    for _ in range(10):
        started = clock()
        count = kernels.multiply_add(pool.handle, 1 << 21)
        middle = clock()
        kernels.read(pool.handle, memory.data_ptr(), memory.numel())
        flops = max(flops, count / (middle - started) / 1e9)
        bandwidth = max(bandwidth, memory.nbytes / (clock() - middle) / 1e9)
    return flops, bandwidth


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.kernels_cpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="per way and case")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens that a decoding sequence holds")
    parser.add_argument("--kernels", default="auto", help="instruction set, for example avx2")
    parser.add_argument("--without-pytorch", action="store_true")
    parser.add_argument("--cpu-time", action="store_true", help="of all threads: with one, fit for a busy machine")
    options = parser.parse_args()

    torch.set_num_threads(options.num_threads)
    torch.set_grad_enabled(False)
    clock = time.process_time if options.cpu_time else time.perf_counter
    kernels, spec, cases = load_kernels(options.kernels), smollm2_spec(), make_cases(options.context)
    before = calibrate(kernels, options.num_threads, clock)
    ways: dict[str, tuple[CausalLM | CpuDecoder, KVCache]] = {}
    weight_bytes: dict[str, float] = {}
    for name, (weight_format, kv_dtype) in FORMATS.items():
        decoder = CpuDecoder(
            random_model(spec),
            spec,
            SingleProcessGroup(),
            kernels,
            num_threads=options.num_threads,
            weight_format=weight_format,
        )
        weight_bytes[name] = decoder.step_bytes
        ways[name] = (decoder, make_cache(spec, kv_dtype, cases))
    if not options.without_pytorch:
        ways["PyTorch fp32"] = (random_model(spec), ways["fp32"][1])

    rows = []
    for case in cases:
        found = quickest_in_turn({name: step_of(case, *way) for name, way in ways.items()}, options.seconds, clock)
        cells = [f"{ms:.1f} ms, {1e3 * case.num_tokens / ms:,.0f}" for ms in found.values()]
        rows.append((case.name, *cells))
        if case is cases[0]:
            single = found
    after = calibrate(kernels, options.num_threads, clock)

    print(heading(("torch",)))
    print(
        f"{kernels.description}, {options.num_threads} threads; context {options.context}, blocks of {BLOCK_SIZE}; "
        f"{'CPU' if options.cpu_time else 'wall'} time\n"
    )
    for when, (flops, bandwidth) in (("before", before), ("after", after)):
        print(f"The machine {when}: {flops:,.0f} GFLOP/s fp32, {bandwidth:.1f} GB/s from memory\n")
    print(markdown_table(("step, and tokens per second", *ways), rows))
    bandwidth = max(before[1], after[1])
    bounds = [(name, f"{b / 1e6:.0f}", b / bandwidth / 1e6, single[name]) for name, b in weight_bytes.items()]
    print("One sequence against reading its weights once:\n")
    print(markdown_table(("weights", "MB", "at full bandwidth, ms", "step, ms"), bounds))


if __name__ == "__main__":
    main()
