"""The prompts of `generate`: from the command line and from a file.

Owns what a file may hold and how a bad line is named. Does not know what becomes of a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.deployment_errors import UsageError

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One thing to be continued: plain text, or a conversation."""

    index: int
    text: str | None = None
    messages: tuple[Message, ...] = ()

    @property
    def summary(self) -> str:
        return self.text if self.text is not None else str(self.messages[-1].get("content", ""))


def read_prompts(given: Iterable[str], file: Path | None, *, as_chat: bool) -> list[Prompt]:
    """The prompts of the command line, then those of `file`.

    Raises:
        UsageError: there are none, or the file cannot be read; the message names the line.
    """
    entries: list[str | list[Message]] = []
    for text in given:
        _check_unicode(text, "--prompt")
        entries.append(text)
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{file} cannot be read: {error}") from error
        for number, line in enumerate(lines, start=1):
            if line.strip():
                entries.append(_parse_entry(line, f"{file}:{number}") if file.suffix == ".jsonl" else line)
    if not entries:
        raise UsageError("there is nothing to answer; give --prompt TEXT or --file FILE")
    prompts = []
    for index, entry in enumerate(entries):
        if isinstance(entry, list):
            prompts.append(Prompt(index, messages=tuple(entry)))
        elif as_chat:
            prompts.append(Prompt(index, messages=({"role": "user", "content": entry},)))
        else:
            prompts.append(Prompt(index, text=entry))
    return prompts


def _parse_entry(line: str, place: str) -> str | list[Message]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; a deep nest
        raise UsageError(f"{place}: not JSON ({error}); give one object per line") from error
    _check_unicode(entry, place)
    if isinstance(entry, dict):
        if isinstance(entry.get("prompt"), str):
            return str(entry["prompt"])
        messages = entry.get("messages")
        if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
            return messages
    raise UsageError(f'{place}: give an object with "prompt" (text) or "messages" (a list of role and content)')


def _check_unicode(entry: Any, place: str) -> None:
    """A backslash and a byte that is not UTF-8 can both hide half of a surrogate pair, which no tokenizer takes."""
    try:
        json.dumps(entry, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{place}: not valid Unicode ({error.reason}); write the text as UTF-8") from error
