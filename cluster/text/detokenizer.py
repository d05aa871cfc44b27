"""Token by token to text, never half a character.

Owns the bytes of a character that is not complete yet. What it emits, joined, is exactly what decoding all tokens at
once gives, for every output that is valid UTF-8, and for a byte-level vocabulary for every output at all. (Where a
byte-fallback vocabulary is made to say invalid UTF-8, decoding at once also spoils valid neighbours; here they stand.)
"""

from __future__ import annotations

import codecs

from cluster.text.tokenizer import Tokenizer

_utf8 = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """The text of one sequence. `at_start`: the tokens open a text, rather than continue a prompt."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, at_start: bool = False) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = _utf8(errors="replace")
        self._strip_space = at_start and tokenizer.strips_leading_space

    def push(self, token_id: int) -> str:
        """The text that is certain after this token; possibly empty."""
        if token_id in self._skipped:
            return ""
        data = self._token_bytes(token_id)
        if self._strip_space and data:
            self._strip_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed."""
        return self._decoder.decode(b"", final=True)
