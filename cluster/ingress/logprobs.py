"""Log-probabilities in OpenAI's two notations: parallel lists for completions, objects for chats."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from cluster.text.tokenizer import Tokenizer
from scheduler.output import TokenLogprobs

_LEAST = -9999.0  # JSON has no infinity


class CompletionLogprobs:
    """Grows with the tokens of one choice; `take` gives what was added since the last call."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0
        self._lists = self._empty()

    def add_first_prompt_token(self, token_id: int) -> None:
        """Nothing comes before it, so it has no probability."""
        self._append(token_id, None, None)

    def add(self, scores: TokenLogprobs) -> None:
        for token_id, logprob, top_ids, top_values in _rows(scores):
            top = {_name(self._tokenizer, i): _finite(value) for i, value in zip(top_ids, top_values, strict=True)}
            self._append(token_id, _finite(logprob), {_name(self._tokenizer, token_id): _finite(logprob)} | top)

    def take(self) -> dict[str, list[Any]]:
        taken, self._lists = self._lists, self._empty()
        return taken

    def _append(self, token_id: int, logprob: float | None, top: dict[str, float] | None) -> None:
        name = _name(self._tokenizer, token_id)
        for key, value in zip(self._lists, (self._offset, logprob, name, top), strict=True):
            self._lists[key].append(value)
        self._offset += len(name)

    @staticmethod
    def _empty() -> dict[str, list[Any]]:
        return {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}


def chat_logprobs(tokenizer: Tokenizer, scores: Iterable[TokenLogprobs]) -> dict[str, list[dict[str, Any]]]:
    content = []
    for token_id, logprob, top_ids, top_values in (row for part in scores for row in _rows(part)):
        top = [_entry(tokenizer, i, value) for i, value in zip(top_ids, top_values, strict=True)]
        content.append({**_entry(tokenizer, token_id, logprob), "top_logprobs": top})
    return {"content": content}


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {"token": _name(tokenizer, token_id), "logprob": _finite(logprob), "bytes": list(data)}


def _rows(scores: TokenLogprobs) -> Iterable[tuple[int, float, list[int], list[float]]]:
    return zip(
        scores.token_ids.tolist(),
        scores.logprobs.tolist(),
        scores.top_ids.tolist(),
        scores.top_logprobs.tolist(),
        strict=True,
    )


def _name(tokenizer: Tokenizer, token_id: int) -> str:
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:  # part of a character
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(value: float) -> float:
    return max(value, _LEAST) if not math.isnan(value) else _LEAST
