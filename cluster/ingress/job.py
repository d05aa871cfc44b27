"""One HTTP request's work: the generations of all its prompts, as numbered choices.

Owns submitting them together, merging their deltas and aborting what is left. Knows nothing of HTTP bodies.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from cluster.frontend import Frontend
from cluster.generation import Delta, Generation, GenerationOptions
from scheduler.sampling_params import SamplingParams


class Job:
    """Choice `i * n + j` is text j of prompt i."""

    def __init__(self, frontend: Frontend, generations: Sequence[Generation]) -> None:
        self._frontend = frontend
        self.generations = generations

    @classmethod
    async def submit(
        cls, frontend: Frontend, prompts: Sequence[Sequence[int]], params: SamplingParams, options: GenerationOptions
    ) -> Job:
        """All prompts or none.

        Raises:
            RequestError: the first refusal; what was taken before is aborted.
        """
        generations: list[Generation] = []
        try:
            for prompt_ids in prompts:
                generations.append(await frontend.submit(prompt_ids, params, options))
        except BaseException:
            cls(frontend, generations).abort()
            raise
        return cls(frontend, generations)

    def abort(self) -> None:
        for generation in self.generations:
            self._frontend.abort(generation)

    @property
    def num_choices(self) -> int:
        return sum(generation.params.n for generation in self.generations)

    def generation_of(self, choice: int) -> Generation:
        return self.generations[choice // self.generations[0].params.n]

    async def deltas(self) -> AsyncIterator[list[tuple[int, Delta]]]:
        """(choice, delta) pairs as they come.

        Raises:
            RequestError: one generation was lost; the others are not waited for.
        """
        if len(self.generations) == 1:
            async for deltas in self.generations[0]:
                yield [(delta.index, delta) for delta in deltas]
            return
        async with contextlib.aclosing(self._merged()) as merged:
            async for pairs in merged:
                yield pairs

    async def _merged(self) -> AsyncGenerator[list[tuple[int, Delta]], None]:
        queue: asyncio.Queue[list[tuple[int, Delta]] | Exception | None] = asyncio.Queue()
        tasks = [asyncio.create_task(self._feed(queue, number)) for number in range(len(self.generations))]
        num_left = len(tasks)
        try:
            while num_left:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    num_left -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _feed(self, queue: asyncio.Queue[list[tuple[int, Delta]] | Exception | None], number: int) -> None:
        first = number * self.generations[0].params.n
        try:
            async for deltas in self.generations[number]:
                queue.put_nowait([(first + delta.index, delta) for delta in deltas])
        except Exception as error:
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    def usage(self, *, without_completion: bool = False) -> dict[str, object]:
        num_prompt = sum(len(generation.prompt_ids) for generation in self.generations)
        num_completion = sum(generation.num_completion_tokens for generation in self.generations)
        num_completion = 0 if without_completion else num_completion
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": sum(g.num_cached_tokens for g in self.generations)},
        }
