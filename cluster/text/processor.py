"""All text work of one model: prompts to token ids, conversations to token ids, and outputs back to text.

Owns the pair of tokenizer and chat template. Long prompts are tokenized in a thread, so that an event loop goes on.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cluster.text.chat_template import ChatTemplate
from cluster.text.tokenizer import Tokenizer

_LONG_TEXT = 16_384  # characters; about 5 ms of tokenizing
_long_texts = ThreadPoolExecutor(max_workers=2, thread_name_prefix="antiphon-text")  # each may take 80 bytes per byte


@dataclass(frozen=True, slots=True)
class TextProcessor:
    tokenizer: Tokenizer
    template: ChatTemplate

    @classmethod
    def from_directory(cls, directory: Path) -> TextProcessor:
        """Raises: ValueError, where the model directory has no usable tokenizer."""
        return cls(Tokenizer(directory), ChatTemplate.from_directory(directory))

    def warm_up(self) -> None:
        """Do now what the first text would have to wait for."""
        self.tokenizer.encode(" ")
        _ = self.tokenizer.longest_token

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if len(text) < _LONG_TEXT:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        encode = partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return await asyncio.get_running_loop().run_in_executor(_long_texts, encode)
