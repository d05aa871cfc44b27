"""From answers to figures: latency percentiles, throughput, goodput.

Owns the definitions. TTFT: from when a request was due to its first chunk. TPOT: the time from first to last chunk over
the tokens after the first. ITL: the gaps between chunks, all requests together; some servers send a chunk for each
token, others wait until a character is whole, so look at `tokens_per_chunk` beside it. Knows no HTTP and no workloads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.completion_client import Answer


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep to count as good, in milliseconds; None: nothing."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    latency_ms: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """`ttft=1000,tpot=100`. Raises: ValueError."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            if name not in ("ttft", "tpot", "latency"):
                raise ValueError(f"{name!r} is no part of an SLO; give ttft, tpot or latency, as in ttft=1000,tpot=100")
            limits[f"{name}_ms"] = float(value)
        return cls(**limits)

    def is_kept_by(self, answer: Answer) -> bool:
        measured = ((self.ttft_ms, answer.ttft), (self.tpot_ms, answer.tpot), (self.latency_ms, answer.latency))
        return all(limit is None or value is None or 1e3 * value <= limit for limit, value in measured)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear between the two nearest ranks; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def summarize(answers: Sequence[Answer], wall_s: float, slo: Slo | None = None) -> dict[str, float | int | None]:
    """The figures of one workload, times in milliseconds; failed requests count in `num_failed` alone."""
    good = [answer for answer in answers if answer.error is None]
    num_output = sum(answer.num_output_tokens for answer in good)
    num_input = sum(answer.num_prompt_tokens or len(answer.request.prompt) for answer in good)
    num_chunks = sum(len(answer.chunk_times) for answer in good)
    tpots = [answer.tpot for answer in good if answer.tpot is not None]
    tpot_p50 = percentile(tpots, 50)
    figures: dict[str, float | int | None] = {
        "num_requests": len(answers),
        "num_failed": len(answers) - len(good),
        "wall_s": wall_s,
        "input_tokens": num_input,
        "output_tokens": num_output,
        "cached_tokens": sum(answer.num_cached_tokens or 0 for answer in good),
        "requests_per_s": len(good) / wall_s,
        "output_tokens_per_s": num_output / wall_s,
        "total_tokens_per_s": (num_input + num_output) / wall_s,
        "stream_tokens_per_s": 1 / tpot_p50 if tpot_p50 else None,
        "tokens_per_chunk": num_output / num_chunks if num_chunks else None,
    }
    series = {
        "ttft": [answer.ttft for answer in good],
        "tpot": tpots,
        "itl": [later - earlier for answer in good for earlier, later in pairwise(answer.chunk_times)],
        "latency": [answer.latency for answer in good],
    }
    for name, seconds in series.items():
        for percent in (50, 99):
            value = percentile(seconds, percent)
            figures[f"{name}_p{percent}_ms"] = None if value is None else 1e3 * value
    if slo is not None:
        kept = [answer for answer in good if slo.is_kept_by(answer)]
        figures["good_share"] = len(kept) / len(answers) if answers else None
        figures["good_requests_per_s"] = len(kept) / wall_s
        figures["good_output_tokens_per_s"] = sum(answer.num_output_tokens for answer in kept) / wall_s
    return figures
