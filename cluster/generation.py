"""One request as its client sees it. It outlives the scheduler that works on it.

Owns the prompt, the sampling parameters with a definite seed, and every token delivered so far: what a new scheduler
needs to go on where a lost one stopped. Turns tokens into `Delta`s; knows no sockets and no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from cluster.errors import RequestError
from cluster.protocol import Generate, pack_tokens
from cluster.text.output import OutputText
from cluster.text.tokenizer import Tokenizer
from scheduler.output import TokenLogprobs
from scheduler.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """What a client may ask beside the sampling parameters."""

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""


@dataclass(slots=True)
class Delta:
    """What is new in one of the `n` texts since the last one: one or more tokens and the text they made certain.

    `stop_reason`: the stop string or the requested stop token id that ended it.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one row each, where asked for
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def is_worth_sending(self) -> bool:
        return bool(self.text or self.logprobs or self.finish_reason)


class Generation:
    """Iterate over it for lists of `Delta`s, at most one for each text; several tokens share one if nobody waited."""

    def __init__(
        self,
        request_id: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        options: GenerationOptions,
        tokenizer: Tokenizer,
    ) -> None:
        assert params.seed is not None or params.is_greedy, (
            "without a seed the request could not be continued elsewhere"
        )
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.params = params
        self.options = options
        self.delivered: list[list[int]] = [[] for _ in range(params.n)]
        self.num_cached_tokens = 0
        self.prompt_logprobs: TokenLogprobs | None = None
        self.accepted = asyncio.Event()  # or refused: see `error`
        self.error: RequestError | None = None
        self.on_enough: Callable[[int], None] = lambda index: None  # no further token of this text is wanted
        self._texts = [self._new_text(tokenizer) for _ in range(params.n)]
        self._pending: dict[int, Delta] = {}
        self._arrived = asyncio.Event()

    @property
    def is_finished(self) -> bool:
        return all(text.is_finished for text in self._texts)

    @property
    def num_completion_tokens(self) -> int:
        return sum(map(len, self.delivered))

    def message(self) -> Generate:
        """The request for a scheduler that knows nothing of it.

        Once several texts of one prompt have begun, each is continued as a request of its own, with n = 1 and the seed
        `derive_seed(seed, index)`, which draws what text `index` would have drawn.

        Raises:
            InvalidRequest: a token id that no vocabulary can hold.
        """
        assert self.params.n == 1 or not self.num_completion_tokens, "several begun texts are continued one by one"
        tokens = [*self.prompt_ids, *self.delivered[0]]
        return Generate(
            self.request_id,
            pack_tokens(tokens),
            self.params,
            self.options.priority,
            self.options.tenant,
            self.options.cache_salt,
            len(tokens) - len(self.prompt_ids),
        )

    def push(self, index: int, token_id: int, finish_reason: str | None, logprobs: TokenLogprobs | None) -> None:
        """One token from the scheduler. A token that comes after a stop string is dropped."""
        text = self._texts[index]
        if text.is_finished:
            return
        self.delivered[index].append(token_id)
        delta = self._pending.get(index)
        if delta is None:
            delta = self._pending[index] = Delta(index)
        delta.text += text.push(token_id, finish_reason)
        delta.token_ids.append(token_id)
        if logprobs is not None:
            delta.logprobs.append(logprobs)
        delta.finish_reason, delta.stop_reason = text.finish_reason, text.stop_reason
        if delta.finish_reason is not None and finish_reason is None:
            self.on_enough(index)
        if delta.is_worth_sending:
            self._arrived.set()

    def fail(self, error: RequestError) -> None:
        """No more tokens will come; the first error stays."""
        if self.error is None and not self.is_finished:
            self.error = error
            self.accepted.set()
            self._arrived.set()

    async def wait_until_accepted(self) -> None:
        """Raises: RequestError, where it was refused."""
        await self.accepted.wait()
        if self.error is not None:
            raise self.error

    async def __aiter__(self) -> AsyncIterator[list[Delta]]:
        """Raises: RequestError, after all that was generated before it."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            deltas = [delta for delta in self._pending.values() if delta.is_worth_sending]
            for delta in deltas:
                del self._pending[delta.index]
            if deltas:
                yield deltas
            if self.error is not None:
                raise self.error
            if self.is_finished and not self._pending:
                return

    def _new_text(self, tokenizer: Tokenizer) -> OutputText:
        return OutputText(
            tokenizer,
            stop=self.options.stop,
            stop_token_ids=frozenset(self.params.stop_token_ids),
            min_tokens=self.params.min_tokens,
            include_stop_str_in_output=self.options.include_stop_str_in_output,
            skip_special_tokens=self.options.skip_special_tokens,
        )
