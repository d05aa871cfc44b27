"""What a client may ask of the sampler, checked at the door.

Plain numbers: the scheduler reads the length limits, the worker's sampler reads the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn and when to stop.

    `temperature` 0 is greedy. `top_k` 0 keeps the whole vocabulary. `seed` None lets the scheduler derive one.
    `max_tokens` None means up to the model's length limit. `logprobs` k returns the k likeliest tokens of each
    position beside the sampled one (0: the sampled one alone); `prompt_logprobs` the same for the prompt.

    Raises:
        ValueError: a value is out of its legal range; the message names both.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = 64
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        self._check_range("n", self.n, 1, 128)
        self._check_range("temperature", self.temperature, 0.0, 100.0)
        self._check_range("top_k", self.top_k, 0, 2**31 - 1)
        self._check_range("top_p", self.top_p, 1e-9, 1.0)
        self._check_range("min_p", self.min_p, 0.0, 1.0)
        self._check_range("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        self._check_range("presence_penalty", self.presence_penalty, -100.0, 100.0)
        self._check_range("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        self._check_range("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None:
            self._check_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise ValueError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        if self.seed is not None:
            self._check_range("seed", self.seed, 0, MAX_SEED)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._check_range(name, getattr(self, name), 0, MAX_LOGPROBS)
        for token_id, bias in self.logit_bias.items():
            self._check_range(f"logit_bias[{token_id}]", bias, -100.0, 100.0)

    @staticmethod
    def _check_range(name: str, value: float, low: float, high: float) -> None:
        number = int if isinstance(low, int) else (int, float)
        if isinstance(value, bool) or not isinstance(value, number) or value != value:  # NaN
            kind = "a whole number" if number is int else "a number"
            raise ValueError(f"{name} must be {kind}, not {value!r}")
        if not low <= value <= high:
            raise ValueError(f"{name} is {value}; give a value from {low} to {high}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def derive_seed(seed: int, index: int) -> int:
    """The seed of completion `index` of a request; that of the first is `seed` itself.

    SplitMix64's finaliser (Steele, Lea, Flood 2014), kept to 63 bits.
    """
    if index == 0:
        return seed
    mask = 2**64 - 1
    z = (seed + index * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) & MAX_SEED
