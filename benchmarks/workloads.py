"""What a server is asked to do: prompts of random token ids, output lengths, and how many streams at once.

Owns the standard workloads and how any other is drawn. The same name, seed, vocabulary and scale always give the same
requests. Random ids instead of text, so that no tokenizer's opinion enters and every server computes exactly as many
tokens. Knows neither HTTP nor clocks.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

FIRST_TOKEN_ID = 100  # below it vocabularies keep their special tokens


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    prompt: tuple[int, ...]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """`cold` requests go first, alone and one by one; then `requests`, at most `num_streams` at a time."""

    name: str
    requests: tuple[CompletionRequest, ...]
    num_streams: int
    cold: tuple[CompletionRequest, ...] = ()

    @property
    def max_request_tokens(self) -> int:
        return max(len(r.prompt) + r.num_output_tokens for r in (*self.cold, *self.requests))


@dataclass(frozen=True, slots=True)
class Shape:
    """Counts of a workload, before prompts are drawn. Lengths are (least, most), both inclusive."""

    num_requests: int
    num_streams: int
    input_length: tuple[int, int]
    output_length: tuple[int, int]
    num_shared: int = 0  # tokens that all prompts begin with, in addition to `input_length`

    def scaled(self, scale: float) -> Shape:
        """Fewer and shorter requests. The number of streams stays, as far as there are requests for them."""

        def part(count: int, least: int = 1) -> int:
            return max(least, round(count * scale))

        num_requests = part(self.num_requests)
        return replace(
            self,
            num_requests=num_requests,
            num_streams=min(self.num_streams, num_requests),
            input_length=(part(self.input_length[0]), part(self.input_length[1])),
            output_length=(part(self.output_length[0], 2), part(self.output_length[1], 2)),
            num_shared=part(self.num_shared) if self.num_shared else 0,
        )


STANDARD = {
    "W1": Shape(64, 64, (100, 512), (64, 256)),
    "W2": Shape(48, 8, (256, 256), (128, 128)),
    "W3": Shape(32, 8, (32, 32), (32, 32), num_shared=1024),
    "W3S": Shape(8, 1, (32, 32), (32, 32), num_shared=1024),
    "W4": Shape(1, 1, (32, 32), (256, 256)),
}
MEANINGS = {
    "W1": "64 requests at once, 100-512 tokens in, 64-256 out",
    "W2": "48 requests over 8 streams, 256 in, 128 out",
    "W3": "one cold request, then 32 over 8 streams, 1,024 shared + 32 own tokens in, 32 out",
    "W3S": "one cold request, then 8, one at a time, 1,024 shared + 32 own tokens in, 32 out",
    "W4": "one request, 32 in, 256 out",
}


def make_workload(name: str, *, vocab_size: int, seed: int = 0, scale: float = 1.0) -> Workload:
    """Raises: ValueError, for a name that is not in `STANDARD`."""
    if name not in STANDARD:
        raise ValueError(f"there is no workload {name!r}; give one of {', '.join(STANDARD)}")
    return draw(name, STANDARD[name].scaled(scale), vocab_size=vocab_size, seed=seed)


def draw(name: str, shape: Shape, *, vocab_size: int, seed: int) -> Workload:
    """The requests of `shape`. Where prompts share a beginning, one cold request fills the server's cache first."""
    if vocab_size <= FIRST_TOKEN_ID:
        raise ValueError(f"vocab_size is {vocab_size}; give more than {FIRST_TOKEN_ID}")
    # The name is part of the seed, so that no workload's prompts are in the cache because of another one's.
    rng = random.Random(f"{name} {seed}")

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.choices(range(FIRST_TOKEN_ID, vocab_size), k=count))

    shared = tokens(shape.num_shared)

    def request() -> CompletionRequest:
        prompt = shared + tokens(rng.randint(*shape.input_length))
        return CompletionRequest(prompt, rng.randint(*shape.output_length))

    cold = (request(),) if shared else ()
    return Workload(name, tuple(request() for _ in range(shape.num_requests)), shape.num_streams, cold)


def arrival_times(num_requests: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start of each request of a Poisson process with `rate` requests per second."""
    rng = random.Random(f"arrivals {seed}")
    times, now = [], 0.0
    for _ in range(num_requests):
        times.append(now)
        now += rng.expovariate(rate)
    return times
