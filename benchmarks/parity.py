"""Greedy tokens against transformers', on a real model, for every way of running it.

    python -m benchmarks.parity MODEL [--new-tokens 16] [--every 1] [--ranks 1 2] [--out benchmarks/results/parity.md]

MODEL is a hub id, a Hugging Face directory or a .gguf file. Everything computes in float32 on the CPU. Transformers'
tokens are generated once; each combination of ranks, block size, prefill chunk, prefix cache and one step ahead is then
compared with them, and once more with a cache so small that sequences are preempted. Where the tokens part, the
reference's own logits tell whether two tokens were equally right: a gap below --tie-tolerance is counted as a tie, and
the rest of that prompt, whose context now differs, is not compared. Exits with 1 if any other token differs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from benchmarks.prompts import make_prompts
from benchmarks.report import heading, markdown_table
from cluster.local import Completion, LocalEngine
from configs import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from configs.model_spec import ModelSpec
from scheduler.sampling_params import SamplingParams
from workers.local_executor import LocalExecutor
from workers.prepare import prepare_model

MAX_NUM_SEQS = 32
NUM_CACHE_TOKENS = 16384
NUM_TOP = 16  # of transformers' logits that are kept to judge ties
NUM_REPEATED = 8  # prompts asked a second time where the prefix cache is on, to be answered out of it
NUM_TIGHT_PROMPTS = 8
TIGHT_LIMIT = 300  # tokens of the longest prompt of the runs with preemption
TIGHT_MARGINS = range(5, 14)  # tokens left in its last block: room until all are admitted, not until all are done
BLOCK_SIZES, CHUNKS, SWITCHES = (16, 64, 256), (16, 512), (True, False)


@dataclass(frozen=True, slots=True)
class Expected:
    """What transformers says of one prompt."""

    prompt: list[int]
    token_ids: list[int]
    top_ids: list[list[int]]  # the likeliest at each position, the chosen one first
    top_logits: list[list[float]]

    def gap(self, index: int, token_id: int) -> float:
        """How much less likely, in logits, `token_id` is than the token chosen at `index`."""
        logits = dict(zip(self.top_ids[index], self.top_logits[index], strict=True))
        return logits[self.token_ids[index]] - logits.get(token_id, -math.inf)


@dataclass(frozen=True, slots=True)
class Setting:
    num_ranks: int
    block_size: int
    chunk: int
    prefix_cache: bool
    one_step_ahead: bool
    num_blocks: int | None = None  # given: so few that sequences are preempted

    def config(self, directory: Path) -> EngineConfig:
        return EngineConfig(
            model=ModelConfig(path=str(directory), dtype="float32"),
            parallel=ParallelConfig(tensor_parallel_size=self.num_ranks),
            cache=CacheConfig(
                block_size=self.block_size,
                num_blocks=self.num_blocks or NUM_CACHE_TOKENS // self.block_size,
                enable_prefix_caching=self.prefix_cache,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=MAX_NUM_SEQS,
                max_num_batched_tokens=512,
                max_prefill_chunk=self.chunk,
                one_step_ahead=self.one_step_ahead,
            ),
        )


@dataclass(slots=True)
class Outcome:
    setting: Setting
    num_prompts: int
    num_equal: int = 0
    ties: int = 0
    wrong: int = 0
    widest_gap: float = 0.0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    seconds: float = 0.0

    def judge(self, expected: Sequence[Expected], completions: Sequence[Completion], tolerance: float) -> None:
        for reference, completion in zip(expected, completions, strict=True):
            pairs = enumerate(zip(reference.token_ids, completion.token_ids, strict=True))
            parting = next(((i, ours) for i, (theirs, ours) in pairs if theirs != ours), None)
            if parting is None:
                self.num_equal += 1
                continue
            gap = reference.gap(*parting)
            self.widest_gap = max(self.widest_gap, gap)
            self.ties += gap <= tolerance
            self.wrong += gap > tolerance

    def row(self) -> list[object]:
        setting = self.setting
        return [
            setting.num_ranks,
            setting.block_size,
            setting.chunk,
            "on" if setting.prefix_cache else "off",
            "on" if setting.one_step_ahead else "off",
            setting.num_blocks or NUM_CACHE_TOKENS // setting.block_size,
            self.num_preemptions,
            self.num_cached_tokens,
            f"{self.num_equal}/{self.num_prompts}",
            self.ties,
            self.wrong,
            f"{self.seconds:.1f}",
        ]


COLUMNS = ("TP", "block", "chunk", "prefix", "ahead", "blocks", "preempted", "cached", "equal", "ties", "wrong", "s")


@torch.inference_mode()
def transformers_reference(directory: Path, prompts: list[list[int]], num_tokens: int) -> list[Expected]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        top = torch.cat(out.logits).topk(NUM_TOP, dim=-1)
        token_ids = out.sequences[0, len(prompt) :].tolist()
        expected.append(Expected(prompt, token_ids, top.indices.tolist(), top.values.tolist()))
    return expected


def kept_reference(path: Path | None, directory: Path, prompts: list[list[int]], num_tokens: int) -> list[Expected]:
    """The reference of an earlier run if `path` has it, else a new one, kept there."""
    if path is not None and path.is_file():
        expected = [Expected(**fields) for fields in json.loads(path.read_text(encoding="utf-8"))]
        if [reference.prompt for reference in expected] != prompts or len(expected[0].token_ids) != num_tokens:
            raise SystemExit(f"{path} is the reference of another run; delete it or name another file")
        return expected
    expected = transformers_reference(directory, prompts, num_tokens)
    if path is not None:
        path.write_text(json.dumps([asdict(reference) for reference in expected]), encoding="utf-8")
    return expected


def tight_subset(prompts: list[list[int]], block_size: int) -> tuple[list[int], int]:
    """Prompts that will need another block once all of them are decoding, and as many blocks as they have."""
    margins = {i: -len(prompt) % block_size for i, prompt in enumerate(prompts) if len(prompt) <= TIGHT_LIMIT}
    chosen = [i for i, margin in margins.items() if margin in TIGHT_MARGINS][:NUM_TIGHT_PROMPTS]
    return chosen, sum(-(-len(prompts[i]) // block_size) for i in chosen)


class Comparison:
    """One model, its prompts and what transformers made of them."""

    def __init__(self, directory: Path, prompts: list[list[int]], expected: list[Expected], tolerance: float) -> None:
        self.spec = ModelSpec.from_directory(directory)
        self.prompts = prompts
        self.expected = expected
        self.tolerance = tolerance

    def run(self, num_ranks: int, block_size: int, every: int) -> Iterator[Outcome]:
        """All combinations of what the scheduler decides, over one executor, roomy and then tight."""
        roomy = [
            Setting(num_ranks, block_size, chunk, prefix_cache, ahead)
            for chunk, prefix_cache, ahead in product(CHUNKS, SWITCHES, SWITCHES)
        ]
        yield from self._over_one_executor(roomy[::every], list(range(len(self.prompts))))
        chosen, num_blocks = tight_subset(self.prompts, block_size)
        tight = [replace(setting, num_blocks=num_blocks) for setting in roomy if setting.chunk == CHUNKS[1]]
        yield from self._over_one_executor(tight[::every], chosen)

    def _over_one_executor(self, settings: list[Setting], chosen: list[int]) -> Iterator[Outcome]:
        with LocalExecutor(settings[0].config(self.spec.directory), self.spec) as executor:
            for epoch, setting in enumerate(settings):
                config = setting.config(self.spec.directory)
                engine = LocalEngine(config, self.spec, executor, engine_epoch=epoch)
                yield self._outcome(engine, setting, chosen)

    def _outcome(self, engine: LocalEngine, setting: Setting, chosen: list[int]) -> Outcome:
        started = time.perf_counter()
        num_tokens = len(self.expected[0].token_ids)
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        repeated = chosen[-NUM_REPEATED:] if setting.prefix_cache else []
        outcome = Outcome(setting, len(chosen) + len(repeated))
        for asked in (chosen, repeated):
            completions = engine.generate([self.prompts[i] for i in asked], params)
            engine.scheduler.check_integrity()
            outcome.judge([self.expected[i] for i in asked], completions, self.tolerance)
        stats = engine.scheduler.stats()
        outcome.num_preemptions = stats.num_preemptions
        outcome.num_cached_tokens = stats.num_cached_prompt_tokens
        outcome.seconds = time.perf_counter() - started
        return outcome


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--new-tokens", type=int, default=16, help="tokens generated per prompt")
    parser.add_argument("--every", type=int, default=1, help="run only every n-th combination of each block size")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="tensor-parallel sizes")
    parser.add_argument("--tie-tolerance", type=float, default=1e-3, help="gap in logits below which tokens are tied")
    parser.add_argument("--reference", type=Path, help="keep transformers' tokens in this file, and reuse them")
    parser.add_argument("--out", type=Path, help="write the report there too")
    return parser.parse_args()


def report(outcomes: list[Outcome], arguments: argparse.Namespace, prompts: list[list[int]], seconds: float) -> str:
    num_ties, num_wrong = sum(o.ties for o in outcomes), sum(o.wrong for o in outcomes)
    tight = [o for o in outcomes if o.setting.num_blocks is not None]
    lengths = [len(prompt) for prompt in prompts]
    summary = (
        f"{len(prompts)} prompts of {min(lengths)} to {max(lengths):,} tokens, {arguments.new_tokens} greedy tokens "
        f"each, float32; {len(outcomes)} combinations in {seconds / 60:.1f} minutes. {num_wrong} differ from "
        f"transformers'; {num_ties} part from them at a tie (widest gap {max(o.widest_gap for o in outcomes):.1e} in "
        f"transformers' own logits, tolerance {arguments.tie_tolerance:g}). "
        f"{sum(o.num_preemptions > 0 for o in tight)} of {len(tight)} combinations with few blocks preempted.\n"
    )
    table = markdown_table(COLUMNS, [outcome.row() for outcome in outcomes])
    return "\n".join([heading(("torch", "transformers")), summary, table])


def main() -> int:
    arguments = parse_arguments()
    started = time.perf_counter()
    directory = prepare_model(arguments.model)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    prompts = make_prompts(lambda text: list(tokenizer.encode(text).ids))
    expected = kept_reference(arguments.reference, directory, prompts, arguments.new_tokens)
    print(f"transformers: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    comparison = Comparison(directory, prompts, expected, arguments.tie_tolerance)
    outcomes = []
    for num_ranks, block_size in product(arguments.ranks, BLOCK_SIZES):
        for outcome in comparison.run(num_ranks, block_size, arguments.every):
            print(outcome.row(), file=sys.stderr)
            outcomes.append(outcome)
    text = report(outcomes, arguments, prompts, time.perf_counter() - started)
    print(text)
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")
    return int(any(outcome.wrong for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
