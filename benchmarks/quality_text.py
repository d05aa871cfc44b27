"""The text that perplexity is measured on: English prose that every Python brings along, cut as llama.cpp cuts it.

The source is `pydoc_data/topics.py`, the language reference as `help()` shows it. Paragraphs that are indented (code,
grammar, tables) or short (headings) are left out, and line breaks within a paragraph become spaces.
"""

from __future__ import annotations

import hashlib
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from cluster.text.tokenizer import Tokenizer

SHORTEST_PARAGRAPH = 200  # characters


@dataclass(frozen=True, slots=True)
class Text:
    content: str
    source: str

    @property
    def description(self) -> str:
        digest = hashlib.sha256(self.content.encode()).hexdigest()
        return f"{self.source}, {len(self.content):,} characters, sha256 {digest[:16]}"


def language_reference() -> Text:
    found: dict[str, None] = {}  # in order, each once
    for _, topic in sorted(topics.items()):
        for paragraph in re.split(r"\n\s*\n", topic):
            if len(paragraph) >= SHORTEST_PARAGRAPH and not any(line[:1].isspace() for line in paragraph.split("\n")):
                found[" ".join(paragraph.split())] = None
    return Text("\n\n".join(found), f"prose of pydoc_data/topics.py of Python {platform.python_version()}")


def read_text(path: Path) -> Text:
    return Text(path.read_text(encoding="utf-8"), path.name)


def cut(text: Text, tokenizer: Tokenizer, context: int, num_scored: int) -> list[list[int]]:
    """The first chunks of `context` tokens whose second halves hold at least `num_scored` tokens to predict.

    Where the tokenizer begins every text with a token of its own, that one takes the place of each chunk's first.

    Raises:
        ValueError: the text is too short.
    """
    token_ids = tokenizer.encode(text.content, add_special_tokens=False)
    num_chunks = -(-num_scored // num_scored_of(context))
    if num_chunks * context > len(token_ids):
        most = len(token_ids) // context * num_scored_of(context)
        raise ValueError(
            f"the text has {len(token_ids):,} tokens, of which {most:,} can be scored in chunks of {context}; "
            "ask for fewer, or give a longer text"
        )
    begin = tokenizer.encode("")[:1]
    chunks = [token_ids[start : start + context] for start in range(0, num_chunks * context, context)]
    return [begin + chunk[len(begin) :] for chunk in chunks]


def num_scored_of(context: int) -> int:
    """The second half of a chunk predicts, and its last token has no successor within the chunk."""
    return context - 1 - context // 2
