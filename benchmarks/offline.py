"""Tokens per second of the engine alone: many sequences of random lengths at once, without Ray, HTTP or text.

    python -m benchmarks.offline          # the demo's model, 64 sequences, 100-256 tokens in, as many out
    python -m benchmarks.offline --model DIR --num-seqs 256 --input-len 100-1024 --output-len 100-1024
    python -m benchmarks.offline --set model.quantization=int8 --set worker.num_threads=4

The shape is that of nano-vllm's benchmark: prompts of random token ids, lengths drawn evenly, everything added at once,
temperature 0.6, no end of sequence. Scheduler and ranks run as in a deployment, one step ahead, in this process. What
comes before the first token (weights, KV cache, one short warm-up) does not count. Exits with 1 if a sequence did not
get exactly its tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.report import heading, markdown_table
from benchmarks.serve import length_range
from benchmarks.workloads import Shape, Workload, draw
from cluster.local import LocalEngine
from configs import EngineConfig
from configs.loader import ConfigError, load_config
from configs.model_spec import ModelSpec
from scheduler.sampling_params import SamplingParams
from workers.prepare import prepare_model

PRESET = "smollm2-135m-cpu"


@dataclass(frozen=True, slots=True)
class Figures:
    num_seqs: int
    input_tokens: int
    output_tokens: int
    wall_s: float
    num_wrong: int  # sequences that got fewer or more tokens than they asked for

    @property
    def rates(self) -> dict[str, float]:
        return {
            "output_tokens_per_s": self.output_tokens / self.wall_s,
            "total_tokens_per_s": (self.input_tokens + self.output_tokens) / self.wall_s,
        }


def params_of(workload: Workload, temperature: float) -> list[SamplingParams]:
    """A seed of its own for each sequence, so that two runs draw the same tokens."""
    return [
        SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=request.num_output_tokens, seed=number)
        for number, request in enumerate(workload.requests)
    ]


def generate(engine: LocalEngine, workload: Workload, temperature: float) -> Figures:
    prompts = [list(request.prompt) for request in workload.requests]
    params = params_of(workload, temperature)
    started = time.perf_counter()
    completions = engine.generate(prompts, params)
    wall_s = time.perf_counter() - started
    lengths = [len(completion.token_ids) for completion in completions]
    num_wrong = sum(got != asked.max_tokens for got, asked in zip(lengths, params, strict=True))
    return Figures(len(prompts), sum(map(len, prompts)), sum(lengths), wall_s, num_wrong)


def measure(config: EngineConfig, spec: ModelSpec, options: argparse.Namespace) -> list[Figures]:
    shape = Shape(options.num_seqs, options.num_seqs, options.input_len, options.output_len)
    warm_up = Shape(2, 2, (16, 16), (4, 4))
    with LocalEngine(config, spec) as engine:
        generate(engine, draw("warm-up", warm_up, vocab_size=spec.vocab_size, seed=0), options.temperature)
        found = []
        for repeat in range(options.repeats):
            # Other prompts each time: the prefix cache knows those of the last one.
            workload = draw("offline", shape, vocab_size=spec.vocab_size, seed=options.seed + repeat)
            found.append(generate(engine, workload, options.temperature))
            print(f"repeat {repeat}: {found[-1].wall_s:.1f} s", file=sys.stderr)
        return found


def configure(options: argparse.Namespace) -> EngineConfig:
    longest = options.input_len[1] + options.output_len[1]
    overrides = [f"model.max_model_len={longest}", f"scheduler.max_num_waiting={options.num_seqs + 1}"]
    if options.model is not None:
        overrides.append(f"model.path={options.model}")
    return load_config(options.config, [*overrides, *options.overrides])


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="benchmarks.offline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--config", default=PRESET, help=f"YAML file or preset; default: {PRESET}")
    made.add_argument("--model", help="hub id, directory or .gguf file instead of the configuration's")
    made.add_argument("--set", action="append", default=[], dest="overrides", metavar="SECTION.OPTION=VALUE")
    made.add_argument("--num-seqs", type=int, default=64)
    made.add_argument("--input-len", type=length_range, default=(100, 256))
    made.add_argument("--output-len", type=length_range, default=(100, 256))
    made.add_argument("--temperature", type=float, default=0.6)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--repeats", type=int, default=1)
    made.add_argument("--json", action="store_true", help="figures as JSON instead of a table")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        config = configure(options)
    except ConfigError as error:
        raise SystemExit(str(error)) from error
    directory = prepare_model(config.model.path, config.model.cache_dir)
    found = measure(config, ModelSpec.from_directory(directory), options)
    if options.json:
        described: list[dict[str, Any]] = [asdict(figures) | figures.rates for figures in found]
        print(json.dumps(described, indent=2))
    else:
        print(heading(("torch",)))
        rows = [(f.num_seqs, f.input_tokens, f.output_tokens, f.wall_s, *f.rates.values()) for f in found]
        print(markdown_table(("sequences", "tokens in", "out", "seconds", "output tok/s", "total tok/s"), rows))
    return 1 if any(figures.num_wrong for figures in found) else 0


if __name__ == "__main__":
    sys.exit(main())
