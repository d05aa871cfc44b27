"""What `benchmarks.quality` found as tables, and what of it is beyond the bounds that docs/cpu.md states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.quality_figures import Agreement, Figures
from benchmarks.report import markdown_table

LLAMA = "llama.cpp "


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far from the reference a way may be, over some thousand tokens."""

    log_ratio: float  # of the perplexities, either way, beyond two standard errors
    divergence: float
    same_top: float
    mean_logit_gap: float

    def broken_by(self, found: Figures) -> Iterator[str]:
        if abs(found.log_ratio.value) - 2 * found.log_ratio.error > self.log_ratio:
            yield f"log of the ratio of perplexities {found.log_ratio.text(5)}, at most {self.log_ratio:g}"
        if found.divergence.value > self.divergence:
            yield f"mean divergence {found.divergence.value:.6f}, at most {self.divergence:g}"
        if found.same_top < self.same_top:
            yield f"{found.same_top:.2%} of the likeliest tokens equal, at least {self.same_top:.1%}"
        if found.mean_logit_gap is not None and found.mean_logit_gap > self.mean_logit_gap:
            yield f"logits {found.mean_logit_gap:.4f} apart in the mean, at most {self.mean_logit_gap:g}"


BOUNDS = {
    "fp32": Bounds(log_ratio=1e-5, divergence=1e-6, same_top=0.999, mean_logit_gap=1e-3),
    "bf16": Bounds(log_ratio=0.002, divergence=0.0005, same_top=0.985, mean_logit_gap=0.1),
    "int8": Bounds(log_ratio=0.005, divergence=0.01, same_top=0.95, mean_logit_gap=0.4),
    "int4": Bounds(log_ratio=0.005, divergence=0.005, same_top=0.965, mean_logit_gap=0.2),  # weights of a Q4_1 file
    f"{LLAMA}F32": Bounds(log_ratio=1e-4, divergence=1e-5, same_top=0.995, mean_logit_gap=0.0),  # base is rounded
}
"""By how the name of a way begins."""


def complaints(figures: Mapping[str, Figures]) -> list[str]:
    return [
        f"{name}: {broken}"
        for name, found in figures.items()
        for start, bounds in BOUNDS.items()
        if name.startswith(start)
        for broken in bounds.broken_by(found)
    ]


def text_table(figures: Mapping[str, Figures]) -> str:
    columns = (
        "way", "perplexity", "log of its ratio", "divergence", "most", "likeliest equal", "logits apart, mean", "most",
    )  # fmt: skip
    rows = [
        (
            name,
            found.perplexity.text(3),
            found.log_ratio.text(5),
            found.divergence.text(6),
            f"{found.most_divergence:.4f}",
            f"{found.same_top:.2%}",
            "" if found.mean_logit_gap is None else f"{found.mean_logit_gap:.5f}",
            "" if found.most_logit_gap is None else f"{found.most_logit_gap:.4f}",
        )
        for name, found in figures.items()
    ]
    return markdown_table(columns, rows)


def greedy_table(agreements: Mapping[str, Agreement]) -> str:
    columns = ("way", "answers equal", "where the others part, median", "tokens before that", "equal if forced")
    rows = [
        (
            name,
            f"{found.num_equal} of {found.num_prompts}",
            "" if found.median_parted is None else f"{found.median_parted:g}",
            f"{found.equal_share:.2%}",
            f"{found.forced_share:.2%}",
        )
        for name, found in agreements.items()
    ]
    return markdown_table(columns, rows)
