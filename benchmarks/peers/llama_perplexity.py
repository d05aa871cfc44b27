"""llama.cpp's own comparison with a base model, over our tokens and our reference's log-probabilities.

`llama-perplexity --kl-divergence` reads tokens and log-probabilities from a file that it writes itself for another
model. Here the file is written from our reference's logits. So llama.cpp computes exactly the tokens that we do and is
compared with what we are compared with; with float32 weights it must come out equal.

The file: the magic, context, vocabulary and number of chunks as int32, all tokens as int32; then for each scored
position two float32, a step and the lowest log-probability, and a uint16 for each token of the vocabulary, how many
steps it is above. What is more than 16 nats below the likeliest counts as being there.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers.llama_cpp import VARIANTS
from benchmarks.quality_figures import Figures, Mean

EXACT = "f32"  # the variant that must come out equal
MAGIC = b"_logits_"
DEPTH = 16.0  # nats
NUM_STEPS = 65535
FEWEST_TOKENS = 100  # of which llama.cpp makes statistics
TIMEOUT_S = 1800.0
NUM_LOG_LINES = 20

_NUMBER = r"\s*(-?[\d.]+)"
_FIGURE = re.compile(rf"^(.+?)\s*:{_NUMBER}(?:\s*±{_NUMBER})?", re.MULTILINE)


class LlamaError(RuntimeError):
    """llama.cpp's program failed; the message ends with its last words."""


class BaseWriter:
    """Writes the file chunk by chunk."""

    def __init__(self, path: Path, chunks: Sequence[Sequence[int]], vocab_size: int) -> None:
        self._file = path.open("wb")
        self._file.write(MAGIC)
        self._file.write(np.array([len(chunks[0]), vocab_size, len(chunks)], dtype=np.int32).tobytes())
        self._file.write(np.array(chunks, dtype=np.int32).tobytes())

    def add(self, logits: Tensor) -> None:
        """float32 [scored positions of a chunk, vocabulary]"""
        num_rows, vocab_size = logits.shape
        highest = logits.amax(dim=-1, keepdim=True)
        lowest = torch.maximum(logits.amin(dim=-1, keepdim=True), highest - DEPTH)
        step = ((highest - lowest) / NUM_STEPS).clamp(min=torch.finfo(torch.float32).tiny)
        steps = ((logits - lowest) / step).round().clamp(0, NUM_STEPS)
        lowest_log_probability = lowest - torch.logsumexp(logits, dim=-1, keepdim=True)
        rows = np.zeros((num_rows, 4 + vocab_size + vocab_size % 2), dtype=np.uint16)
        rows[:, :4] = torch.cat([step, lowest_log_probability], dim=1).numpy().view(np.uint16)
        rows[:, 4 : 4 + vocab_size] = steps.numpy()
        self._file.write(rows.tobytes())

    def close(self) -> None:
        self._file.close()


def needed(peers: Path, gguf: Path, variants: Sequence[str]) -> tuple[Path, list[Path]]:
    """The program, and the weights of each variant.

    Raises:
        ValueError: a variant is not known, or something is not there.
    """
    for variant in variants:
        if variant not in VARIANTS:
            raise ValueError(f"llama.cpp has no variant {variant!r}; give some of {', '.join(VARIANTS)}")
    program = peers / "llama.cpp" / "bin" / "llama-perplexity"
    weights = [gguf / VARIANTS[variant] for variant in variants]
    for path in (program, *weights):
        if not path.exists():
            raise ValueError(f"llama.cpp needs {path}, which is not there; see benchmarks/peers/README.md")
    return program, weights


def compare(program: Path, weights: Path, base: Path, *, context: int, num_threads: int) -> Figures:
    """One format against `base`.

    Every option that changes numbers is the server's default, as in the comparisons of speed; but float32 weights get a
    float32 KV cache, so that nothing is left that could differ.

    Raises:
        LlamaError: the program failed, or did not print what it should.
    """
    command = [
        str(program), "--model", str(weights),
        "--kl-divergence", "--kl-divergence-base", str(base),
        "--ctx-size", str(context),
        "--batch-size", str(context),
        "--threads", str(num_threads),
        "--flash-attn", "on",
    ]  # fmt: skip
    if weights.name == VARIANTS[EXACT]:
        command += ["--cache-type-k", "f32", "--cache-type-v", "f32"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S
    )
    try:
        if done.returncode:
            raise ValueError(f"ended with {done.returncode}")
        return read_figures(done.stdout)
    except ValueError as error:
        last = "\n".join((done.stderr + done.stdout).splitlines()[-NUM_LOG_LINES:])
        raise LlamaError(f"{program.name} with {weights.name}: {error}:\n{last}") from error


def read_figures(output: str) -> Figures:
    """Raises: ValueError: a figure is missing."""
    found = {name: (float(value), float(error or 0)) for name, value, error in _FIGURE.findall(output)}
    try:
        return Figures(
            perplexity=Mean(*found["Mean PPL(Q)"]),
            log_ratio=Mean(*found["Mean ln(PPL(Q)/PPL(base))"]),
            divergence=Mean(*found["Mean    KLD"]),
            most_divergence=found["Maximum KLD"][0],
            same_top=found["Same top p"][0] / 100,
        )
    except KeyError as missing:
        raise ValueError(f"no {missing.args[0]!r} in its output") from missing
