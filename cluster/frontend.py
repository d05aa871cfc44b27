"""The asyncio client of one or more schedulers: prompts in, streams of text out.

Owns the connections to all replicas, the choice among them and the numbers and seeds of requests. Used by HTTP and by
the offline commands alike. Knows nothing of HTTP and nothing of scheduling.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any, Self

from cluster.errors import InvalidRequest, Overloaded, Unavailable
from cluster.generation import Delta, Generation, GenerationOptions
from cluster.protocol import Status, size_of_scores
from cluster.replica_client import ReplicaClient
from cluster.router import Router
from cluster.text.processor import TextProcessor
from cluster.transport import Address
from scheduler.sampling_params import MAX_SEED, SamplingParams

ANSWER_TIMEOUT_S = 30.0
"""For a scheduler to take or to refuse a request; it does so within one turn of its loop."""

MAX_SCORES = 32 * 1024 * 1024  # bytes: half of what a frame holds
MOST_SHRINKING = 4
"""A tokenizer may normalize a text before it cuts it: to as little as a quarter, where it composes characters."""


class Frontend:
    """Lives inside one event loop: `async with Frontend(...) as frontend`, or `start` and `close`.

    `text = TextProcessor.from_directory(model_directory)`. `seed` is the configuration's: requests that bring none
    get theirs from it, so that each can be continued by another scheduler with the tokens it would have had.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        token: str,
        text: TextProcessor,
        name: str = "ingress",
        seed: int = 0,
        router: Router | None = None,
    ) -> None:
        self.text = text
        self._changed = asyncio.Event()
        self._replicas = [
            ReplicaClient(address, token=token, name=name, on_change=self._changed.set) for address in addresses
        ]
        self._router = router or Router()
        self._request_ids = itertools.count(1)
        self._seeds = random.Random(f"{seed}/{name}")
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, timeout: float = 10.0) -> None:  # noqa: ASYNC109 - said in the error
        """Connect to the schedulers; those that are missing or lost later are tried again in the background.

        Raises:
            Unavailable: none answered within `timeout`.
        """
        self._tasks = [asyncio.create_task(replica.run()) for replica in self._replicas]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while all(replica.status is None for replica in self._replicas):
                    await self._changed.wait()
                    self._changed.clear()
                return
        await self.close()
        errors = "; ".join(f"{replica.address}: {replica.last_error}" for replica in self._replicas)
        raise Unavailable(f"no scheduler answered within {timeout:g} s ({errors})")

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        for replica in self._replicas:
            for generation in list(replica.open.values()):
                generation.fail(Unavailable("the ingress is shutting down"))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def status(self) -> list[Status | None]:
        """One for each replica; None: not connected."""
        return [replica.status for replica in self._replicas]

    def problems(self) -> list[str]:
        """Why each replica that takes no requests does not."""
        return [
            f"replica {number}: {replica.last_error if replica.status is None else _explain(replica.status)}"
            for number, replica in enumerate(self._replicas)
            if replica.status is None or not replica.status.is_healthy
        ]

    @property
    def is_healthy(self) -> bool:
        """Whether at least one replica has all its ranks and takes requests."""
        return any(status is not None and status.is_healthy for status in self.status())

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises: InvalidRequest, without the work of tokenizing where a text is too long for any of our models."""
        self._refuse_too_long(text)
        return await self.text.encode(text, add_special_tokens=add_special_tokens)

    async def encode_chat(self, messages: Sequence[dict[str, Any]], /, **template_arguments: Any) -> list[int]:
        """Raises: InvalidRequest, also where the template refuses the messages."""
        limit = self._max_model_len
        if limit is not None and len(messages) > limit:  # no template makes nothing of a message
            raise InvalidRequest(
                f"{len(messages):,} messages are more than the model's limit of {limit} tokens can hold; send fewer",
                parameter="messages",
            )
        return await self.encode(self.text.template.render(messages, **template_arguments), add_special_tokens=False)

    async def submit(
        self, prompt_ids: Sequence[int], params: SamplingParams, options: GenerationOptions | None = None
    ) -> Generation:
        """A request that a scheduler has taken. Iterate over it, and `abort` it if you leave before its end.

        Raises:
            InvalidRequest, Overloaded, Unavailable: no replica takes it; the message is the last one's.
        """
        options = options or GenerationOptions()
        if not prompt_ids:
            raise InvalidRequest("the prompt is empty; give at least one token", parameter="prompt")
        limit = self._max_model_len
        # The scheduler would say the same, at the cost of everybody's next step.
        if limit is not None and len(prompt_ids) >= limit:
            raise InvalidRequest(
                f"the prompt has {len(prompt_ids)} tokens and leaves no room for a completion within the model's limit "
                f"of {limit} tokens; shorten it",
                parameter="prompt",
            )
        if params.prompt_logprobs is not None and size_of_scores(len(prompt_ids), params.prompt_logprobs) > MAX_SCORES:
            raise InvalidRequest(
                f"the log-probabilities of {len(prompt_ids)} prompt tokens are too many for one answer; "
                "ask for fewer alternatives, or without echo",
                parameter="logprobs",
            )
        if params.seed is None:
            params = replace(params, seed=self._seeds.randint(0, MAX_SEED))
        refusal: Unavailable | Overloaded | None = None
        for number in self._router.order(prompt_ids, self._loads(), options.cache_salt):
            generation = Generation(next(self._request_ids), prompt_ids, params, options, self.text.tokenizer)
            try:
                await self._offer(self._replicas[number], generation)
            except (Unavailable, Overloaded) as error:
                refusal = error
            else:
                self._router.note(prompt_ids, number, options.cache_salt)
                return generation
        raise refusal or Unavailable(f"no replica takes requests ({'; '.join(self.problems())})")

    def abort(self, generation: Generation) -> None:
        """The client has gone or has had enough. Finished requests are no error."""
        for replica in self._replicas:
            if replica.open.get(generation.request_id) is generation:
                replica.abort(generation)

    async def generate(
        self, prompt: str | Sequence[int], params: SamplingParams, options: GenerationOptions | None = None
    ) -> AsyncGenerator[Delta, None]:
        """The deltas of all `n` texts as they come; leaving the iteration aborts the request.

        Raises:
            RequestError: refused, or lost on the way.
        """
        prompt_ids = await self.encode(prompt) if isinstance(prompt, str) else prompt
        generation = await self.submit(prompt_ids, params, options)
        try:
            async for deltas in generation:
                for delta in deltas:
                    yield delta
        finally:
            self.abort(generation)

    async def chat(
        self,
        messages: Sequence[dict[str, Any]],
        params: SamplingParams,
        options: GenerationOptions | None = None,
        **template_arguments: Any,
    ) -> AsyncGenerator[Delta, None]:
        """`generate` for a conversation, ready for the assistant's answer."""
        prompt_ids = await self.encode_chat(messages, **template_arguments)
        async with contextlib.aclosing(self.generate(prompt_ids, params, options)) as deltas:
            async for delta in deltas:
                yield delta

    async def _offer(self, replica: ReplicaClient, generation: Generation) -> None:
        replica.submit(generation)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await generation.wait_until_accepted()
        except TimeoutError as error:
            replica.abort(generation)
            raise Unavailable(
                f"the scheduler at {replica.address} did not answer within {ANSWER_TIMEOUT_S:g} s"
            ) from error
        except BaseException:
            replica.abort(generation)
            raise

    @property
    def _max_model_len(self) -> int | None:
        return max((status.max_model_len for status in self.status() if status is not None), default=None)

    def _refuse_too_long(self, text: str) -> None:
        limit = self._max_model_len
        if limit is not None and len(text) > MOST_SHRINKING * self.text.tokenizer.longest_token * limit:
            raise InvalidRequest(
                f"the prompt has {len(text):,} characters, more than the model's limit of {limit} tokens can hold; "
                "shorten it",
                parameter="prompt",
            )

    def _loads(self) -> list[int | None]:
        """Replicas that are connected and not known to refuse."""
        return [
            replica.load if replica.status is not None and replica.status.is_healthy else None
            for replica in self._replicas
        ]


def _explain(status: Status) -> str:
    if status.state != "healthy":
        return f"{status.state}: {status.reason}" if status.reason else status.state
    return f"{status.num_ranks_alive} of {status.num_ranks} ranks are alive"
