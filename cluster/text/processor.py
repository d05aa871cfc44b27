"""All text work of one model: prompts to token ids, conversations to token ids, and outputs back to text.

Owns the pair of tokenizer and chat template. Long prompts are tokenized in a thread, so that an event loop goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.text.chat_template import ChatTemplate
from cluster.text.tokenizer import Tokenizer

_LONG_TEXT = 16_384  # characters; about 5 ms of tokenizing


@dataclass(frozen=True, slots=True)
class TextProcessor:
    tokenizer: Tokenizer
    template: ChatTemplate

    @classmethod
    def from_directory(cls, directory: Path) -> TextProcessor:
        """Raises: ValueError, where the model directory has no usable tokenizer."""
        return cls(Tokenizer(directory), ChatTemplate.from_directory(directory))

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if len(text) < _LONG_TEXT:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    async def encode_chat(self, messages: Sequence[dict[str, Any]], **template_arguments: Any) -> list[int]:
        """The prompt of a conversation; `template_arguments` go to `ChatTemplate.render`.

        Raises:
            InvalidRequest: no template, or it refuses the messages.
        """
        return await self.encode(self.template.render(messages, **template_arguments), add_special_tokens=False)
