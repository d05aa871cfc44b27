"""POST /v1/chat/completions: a conversation in, the assistant's next message out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from cluster.frontend import Frontend
from cluster.generation import Delta
from cluster.ingress.events import ChunkEncoder, answer_events
from cluster.ingress.job import Job
from cluster.ingress.logprobs import chat_logprobs
from cluster.ingress.schemas import ChatBody
from scheduler.output import TokenLogprobs


class ChatAnswer:
    """One request on its way. `start` submits it; then either `whole` or `events`, and `abort` at the end."""

    def __init__(self, job: Job, body: ChatBody, head: dict[str, Any], frontend: Frontend) -> None:
        self._job = job
        self._body = body
        self._head = head
        self._tokenizer = frontend.text.tokenizer
        self.abort = job.abort

    @classmethod
    async def start(cls, frontend: Frontend, body: ChatBody, head: dict[str, Any]) -> ChatAnswer:
        """Raises: RequestError, where it cannot be served."""
        params, options = body.sampling(), body.options()
        prompt_ids = await frontend.encode_chat(body.conversation(), **body.template_arguments())
        return cls(await Job.submit(frontend, [prompt_ids], params, options), body, head, frontend)

    async def whole(self) -> dict[str, Any]:
        """The body of a plain answer."""
        parts: list[list[Delta]] = [[] for _ in range(self._job.num_choices)]
        async for pairs in self._job.deltas():
            for number, delta in pairs:
                parts[number].append(delta)
        choices = [self._choice(number, deltas) for number, deltas in enumerate(parts)]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": self._job.usage()}

    def events(self) -> AsyncGenerator[bytes, None]:
        head = {**self._head, "object": "chat.completion.chunk"}
        encoder = ChunkEncoder(head, includes_usage=self._body.includes_usage)
        role = {"role": "assistant", "content": ""}
        opening = [
            {"index": number, "delta": role, "logprobs": None, "finish_reason": None}
            for number in range(self._job.num_choices)
        ]
        return answer_events(self._job, encoder, self._chunk, opening)

    def _choice(self, number: int, deltas: list[Delta]) -> dict[str, Any]:
        return {
            "index": number,
            "message": {"role": "assistant", "content": "".join(delta.text for delta in deltas), "refusal": None},
            "logprobs": self._logprobs([scores for delta in deltas for scores in delta.logprobs]),
            "finish_reason": deltas[-1].finish_reason,
            "stop_reason": deltas[-1].stop_reason,
        }

    def _chunk(self, number: int, delta: Delta) -> dict[str, Any]:
        chunk = {
            "index": number,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": self._logprobs(delta.logprobs),
            "finish_reason": delta.finish_reason,
        }
        return chunk if delta.stop_reason is None else {**chunk, "stop_reason": delta.stop_reason}

    def _logprobs(self, scores: list[TokenLogprobs]) -> dict[str, list[dict[str, Any]]] | None:
        return chat_logprobs(self._tokenizer, scores) if self._body.logprobs else None
