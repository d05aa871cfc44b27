"""POST /v1/completions: texts or token ids in, texts out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from cluster.frontend import Frontend
from cluster.generation import Delta
from cluster.ingress.events import ChunkEncoder, answer_events
from cluster.ingress.job import Job
from cluster.ingress.logprobs import CompletionLogprobs
from cluster.ingress.schemas import CompletionBody


class CompletionAnswer:
    """One request on its way. `start` submits it; then either `whole` or `events`, and `abort` at the end."""

    def __init__(
        self, job: Job, body: CompletionBody, head: dict[str, Any], echoed: list[str], frontend: Frontend
    ) -> None:
        self._job = job
        self._body = body
        self._head = head
        self._echoed = echoed  # by prompt; empty without `echo`
        self._begun: set[int] = set()
        tokenizer = frontend.text.tokenizer
        wants_scores = body.logprobs is not None
        self._scores = [CompletionLogprobs(tokenizer) for _ in range(job.num_choices)] if wants_scores else []
        self.abort = job.abort

    @classmethod
    async def start(cls, frontend: Frontend, body: CompletionBody, head: dict[str, Any]) -> CompletionAnswer:
        """Raises: RequestError, where it cannot be served."""
        params, options, prompts = body.sampling(), body.options(), body.prompts()
        add_special_tokens = body.add_special_tokens is not False
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        token_ids: list[list[int]] = [prompt for prompt in prompts if isinstance(prompt, list)]
        for text in texts:
            token_ids.append(await frontend.encode(text, add_special_tokens=add_special_tokens))
            await asyncio.sleep(0)  # a thousand texts take seconds: others' turn
        job = await Job.submit(frontend, token_ids, params, options)
        echoed: list[str] = []
        if body.echo:  # token ids are decoded once they are known to be some
            echoed = texts or [frontend.text.tokenizer.decode(ids) for ids in token_ids]
        return cls(job, body, {**head, "object": "text_completion"}, echoed, frontend)

    async def whole(self) -> dict[str, Any]:
        """The body of a plain answer."""
        choices: list[dict[str, Any]] = [
            {"index": i, "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}
            for i in range(self._job.num_choices)
        ]
        texts: list[list[str]] = [[] for _ in choices]
        async for pairs in self._job.deltas():
            for number, delta in pairs:
                choice = self._choice(number, delta)
                texts[number].append(choice["text"])
                choices[number].update(finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)
        for number, choice in enumerate(choices):
            choice["text"] = "".join(texts[number])
            choice["logprobs"] = self._scores[number].take() if self._scores else None
        usage = self._job.usage(without_completion=self._body.only_scores_prompt)
        return {**self._head, "choices": choices, "usage": usage}

    def events(self) -> AsyncGenerator[bytes, None]:
        encoder = ChunkEncoder(self._head, includes_usage=self._body.includes_usage)
        return answer_events(self._job, encoder, self._streamed)

    def _streamed(self, number: int, delta: Delta) -> dict[str, Any]:
        choice = self._choice(number, delta)
        if self._scores:
            choice["logprobs"] = self._scores[number].take()
        return choice

    def _choice(self, number: int, delta: Delta) -> dict[str, Any]:
        text = delta.text
        if number not in self._begun:
            self._begun.add(number)
            text = self._begin(number) + text
        hides_completion = self._body.only_scores_prompt
        if self._scores and not hides_completion:
            for scores in delta.logprobs:
                self._scores[number].add(scores)
        return {
            "index": number,
            "text": self._echoed_text(number) if hides_completion else text,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _begin(self, number: int) -> str:
        """The echoed prompt, and what is known of its tokens."""
        if not self._echoed:
            return ""
        generation = self._job.generation_of(number)
        if self._scores:
            self._scores[number].add_first_prompt_token(generation.prompt_ids[0])
            if generation.prompt_logprobs is not None:
                self._scores[number].add(generation.prompt_logprobs)
        return self._echoed_text(number)

    def _echoed_text(self, number: int) -> str:
        return self._echoed[number * len(self._echoed) // self._job.num_choices]
