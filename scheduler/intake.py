"""The door: a request becomes sequences, or is refused with the reason and the remedy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count

from scheduler.prompt_scores import PromptScores
from scheduler.request import Request
from scheduler.sampling_params import derive_seed
from scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the model and the cache can take. `max_num_tokens`: of one sequence, prompt and completion together."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    eos_token_ids: tuple[int, ...] = ()

    @property
    def max_num_tokens(self) -> int:
        return min(self.max_model_len, self.num_blocks * self.block_size)

    def describe(self) -> str:
        """The binding limit in words."""
        if self.max_model_len <= self.num_blocks * self.block_size:
            return f"the model's limit of {self.max_model_len} tokens"
        return (
            f"the {self.max_num_tokens} tokens that the KV cache holds "
            f"({self.num_blocks} blocks of {self.block_size}; raise cache.num_blocks or the cache's memory)"
        )


class Intake:
    """Makes the sequences of a request, `n` of them, the first one leading."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._seq_ids = count()
        self._eos_ids = frozenset(limits.eos_token_ids)

    def sequences_of(self, request: Request, max_num_tokens: int, queue_key: tuple[float, ...]) -> list[Sequence]:
        lead = self._sequence(request, 0)
        lead.children = [self._child(request, lead, index) for index in range(1, request.sampling_params.n)]
        sequences = [lead, *lead.children]
        for seq in sequences:
            seq.max_num_tokens = max_num_tokens
            seq.queue_key = queue_key
        if request.sampling_params.prompt_logprobs is not None:
            lead.prompt_scores = PromptScores()
        return sequences

    def max_num_tokens(self, request: Request) -> int:
        """How long one sequence of `request` may become.

        Raises:
            ValueError: the request can never be served; the message has the numbers.
        """
        limit = self._limits.max_num_tokens
        self._check_token_ids(request)
        num_prompt_tokens = len(request.token_ids) - request.num_delivered_tokens
        max_tokens = request.sampling_params.max_tokens
        if len(request.token_ids) >= limit:
            raise ValueError(
                f"the prompt has {len(request.token_ids)} tokens and leaves no room for a completion "
                f"within {self._limits.describe()}; shorten it"
            )
        if max_tokens is None:
            return limit
        if request.num_delivered_tokens >= max_tokens:
            raise ValueError(
                f"{request.num_delivered_tokens} tokens were delivered and max_tokens is {max_tokens}; "
                f"nothing is left to generate"
            )
        if num_prompt_tokens + max_tokens > limit:
            raise ValueError(
                f"{num_prompt_tokens} prompt tokens and max_tokens {max_tokens} exceed {self._limits.describe()}; "
                f"ask for at most {limit - num_prompt_tokens} tokens"
            )
        return num_prompt_tokens + max_tokens

    def _check_token_ids(self, request: Request) -> None:
        if not request.token_ids:
            raise ValueError("the prompt is empty; give at least one token")
        if not 0 <= request.num_delivered_tokens < len(request.token_ids):
            raise ValueError(
                f"{request.num_delivered_tokens} of {len(request.token_ids)} tokens cannot be delivered ones"
            )
        vocab_size = self._limits.vocab_size
        named = (*request.sampling_params.logit_bias, *request.sampling_params.stop_token_ids)
        for ids, what in ((request.token_ids, "prompt"), (named, "logit_bias or stop_token_ids")):
            if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
                wrong = next(i for i in ids if not 0 <= i < vocab_size)
                raise ValueError(f"token id {wrong} in the {what} is out of range; legal ids are 0 to {vocab_size - 1}")

    def _child(self, request: Request, lead: Sequence, index: int) -> Sequence:
        """One prompt in memory, however many wait for it: each takes a copy when it gets a token of its own."""
        child = self._sequence(request, index)
        child.parent = lead
        child.token_ids = lead.token_ids
        child.owns_token_ids = lead.owns_token_ids = False
        return child

    def _sequence(self, request: Request, index: int) -> Sequence:
        params = request.sampling_params
        own_params = params if index == 0 else replace(params, prompt_logprobs=None)
        seq = Sequence(request.token_ids, own_params, block_size=self._limits.block_size, seq_id=next(self._seq_ids))
        seq.num_prompt_tokens -= request.num_delivered_tokens
        seq.request_id = request.request_id
        seq.index = index
        seq.priority = request.priority
        seq.cache_salt = request.cache_salt
        seq.seed = derive_seed(seq.seq_id if params.seed is None else params.seed, index)
        seq.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids)
        return seq
