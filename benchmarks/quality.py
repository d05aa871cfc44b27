"""What a weight format costs in quality on the CPU: perplexity, divergence from float32, equal greedy tokens.

    python -m benchmarks.quality                                     # the demo's model, one or two minutes
    python -m benchmarks.quality --model DIR --ways pytorch-fp32,int8 --tokens 4000
    python -m benchmarks.quality --llama f32,q8_0,q4_1               # and llama.cpp's formats, on the same tokens

The first of --ways is the reference. The text is cut into chunks of --context tokens, and every way predicts the second
half of each, as llama.cpp's own program does, which is given the same tokens and the reference's log-probabilities
(`benchmarks.peers.llama_perplexity`). With float32 weights it must come out equal, or the procedures differ. Greedy
tokens come out of the whole engine, eight sequences at a time; "if forced" computes the reference's answers in one step
each and asks for the likeliest token at every place. Exits with 1 if a way is further from the reference than
docs/cpu.md says.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import torch

from benchmarks.peers import llama_perplexity
from benchmarks.peers.antiphon import PRESET
from benchmarks.peers.llama_perplexity import BaseWriter
from benchmarks.peers.system import default_peers_directory
from benchmarks.prompts import make_prompts
from benchmarks.quality_candidate import DEFAULT_WAYS, NUM_SEQS, WAYS, Candidate, load_candidates
from benchmarks.quality_figures import Agreement, Expected, Figures, Scored
from benchmarks.quality_report import LLAMA, complaints, greedy_table, text_table
from benchmarks.quality_text import cut, language_reference, num_scored_of, read_text
from benchmarks.report import heading
from cluster.text.tokenizer import Tokenizer
from configs.loader import load_config
from workers.prepare import prepare_model

PROMPT_LENGTHS = (7, 12, 17, 22, 26, 30, 33, 40, 48, 56, 61, 70, 80, 90, 100, 110, 128, 140, 160, 180)
Chunks = Sequence[Sequence[int]]


def score(candidates: Mapping[str, Candidate], chunks: Chunks, base: BaseWriter | None = None) -> dict[str, Figures]:
    """Chunk by chunk, so that one chunk's logits exist at a time; the reference's go to `base` as well."""
    reference, *_ = candidates.values()
    scored = {name: Scored() for name in candidates}
    for number, chunk in enumerate(chunks, start=1):
        first = len(chunk) // 2
        expected = Expected(reference.logits(chunk, first)[:-1], torch.tensor(chunk[first + 1 :]))
        for name, candidate in candidates.items():
            logits = expected.logits if candidate is reference else candidate.logits(chunk, first)[:-1]
            scored[name].add(logits, expected)
        if base is not None:
            base.add(expected.logits)
        print(f"chunk {number} of {len(chunks)}", file=sys.stderr)
    return {name: found.figures() for name, found in scored.items()}


def score_all(candidates: Mapping[str, Candidate], chunks: Chunks, options: argparse.Namespace) -> dict[str, Figures]:
    """llama.cpp's formats as well, where asked for."""
    if not options.llama:
        return score(candidates, chunks)
    program, weights = llama_perplexity.needed(options.peers, options.gguf or options.peers / "gguf", options.llama)
    with tempfile.TemporaryDirectory(prefix="antiphon-quality-") as folder:
        base = Path(folder) / "base"  # two bytes for each scored token and entry of the vocabulary
        reference, *_ = candidates.values()
        with closing(BaseWriter(base, chunks, reference.vocab_size)) as writer:
            found = score(candidates, chunks, writer)
        for variant, file in zip(options.llama, weights, strict=True):
            print(f"llama.cpp {variant}", file=sys.stderr)
            found[LLAMA + variant.upper()] = llama_perplexity.compare(
                program, file, base, context=options.context, num_threads=options.num_threads
            )
    return found


def compare_greedy(
    candidates: Mapping[str, Candidate], prompts: Sequence[Sequence[int]], num_tokens: int
) -> dict[str, Agreement]:
    reference, *others = candidates
    expected = candidates[reference].greedy(prompts, num_tokens)
    found = {}
    for name in others:
        print(f"greedy tokens of {name}", file=sys.stderr)
        answers = candidates[name].greedy(prompts, num_tokens)
        found[name] = Agreement.of(answers, expected, candidates[name].forced(prompts, expected))
    return found


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="benchmarks.quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--model", help="hub id, directory or .gguf file; default: the demo's")
    made.add_argument("--ways", type=names, default=list(DEFAULT_WAYS), help=f"of {', '.join(WAYS)}")
    made.add_argument("--llama", type=names, default=[], help="f32,q8_0,q4_1: the same model in llama.cpp's formats")
    made.add_argument("--text", type=Path, help="a file in UTF-8; default: prose of Python's language reference")
    made.add_argument("--tokens", type=int, default=8000, help="to score, at least")
    made.add_argument("--context", type=int, default=512, help="tokens of a chunk")
    made.add_argument("--prompts", type=int, default=len(PROMPT_LENGTHS), help="0: no greedy tokens")
    made.add_argument("--new-tokens", type=int, default=64, help="for each prompt")
    made.add_argument("--num-threads", type=int, default=len(os.sched_getaffinity(0)))
    made.add_argument("--peers", type=Path, default=default_peers_directory(), help="where llama.cpp is")
    made.add_argument("--gguf", type=Path, help="folder with F32.gguf, Q8_0.gguf, ...; default: PEERS/gguf")
    made.add_argument("--out", type=Path, help="write the report there too")
    return made


def check(options: argparse.Namespace) -> None:
    """Raises: ValueError: what would only be found after minutes of computing."""
    if not options.ways or (unknown := [name for name in options.ways if name not in WAYS]):
        wrong = f"--ways has {unknown[0]!r}" if options.ways else "--ways is empty"
        raise ValueError(f"{wrong}; give some of {', '.join(WAYS)}")
    if options.context < 4 or options.tokens < 2 or options.new_tokens < 1 or options.num_threads < 1:
        raise ValueError("--context must be 4 or more, --tokens 2 or more, --new-tokens and --num-threads 1 or more")
    if not 0 <= options.prompts <= len(PROMPT_LENGTHS):
        raise ValueError(f"--prompts is {options.prompts}; give a number from 0 to {len(PROMPT_LENGTHS)}")
    if options.llama:
        llama_perplexity.needed(options.peers, options.gguf or options.peers / "gguf", options.llama)
        if options.tokens < llama_perplexity.FEWEST_TOKENS:
            raise ValueError(f"llama.cpp makes no statistics of fewer than {llama_perplexity.FEWEST_TOKENS} --tokens")


def run(options: argparse.Namespace) -> tuple[str, list[str]]:
    """The report, and what is wrong. Raises: ValueError: the options ask for something impossible."""
    check(options)
    started = time.perf_counter()
    directory = prepare_model(options.model or load_config(PRESET).model.path, load_config(PRESET).model.cache_dir)
    tokenizer = Tokenizer(directory)
    text = language_reference() if options.text is None else read_text(options.text)
    chunks = cut(text, tokenizer, options.context, options.tokens)
    prompts = make_prompts(tokenizer.encode, PROMPT_LENGTHS[: options.prompts])
    longest = max([options.context, *(len(prompt) + options.new_tokens for prompt in prompts)])
    torch.set_num_threads(options.num_threads)
    candidates = load_candidates(directory, options.ways, longest)
    figures = score_all(candidates, chunks, options)
    agreements = compare_greedy(candidates, prompts, options.new_tokens) if prompts else {}
    parts = [
        heading(("torch",)),
        f"{directory.name} on {text.description}; {len(chunks)} chunks of {options.context} tokens, the second half of "
        f"each scored: {len(chunks) * num_scored_of(options.context):,} tokens. All beside {options.ways[0]}.\n",
        text_table(figures),
    ]
    if agreements:
        parts.append(f"{len(prompts)} prompts, {options.new_tokens} greedy tokens each, {NUM_SEQS} at a time:\n")
        parts.append(greedy_table(agreements))
    wrong = complaints(figures)
    parts.append("\n".join(wrong) or "Every way is within its bounds.")
    parts.append(f"\n{time.perf_counter() - started:.0f} s on {options.num_threads} threads.\n")
    return "\n".join(parts), wrong


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        text, wrong = run(options)
    except (ValueError, OSError, llama_perplexity.LlamaError) as error:
        raise SystemExit(str(error)) from error
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
