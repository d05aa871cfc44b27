"""Text to token ids and back, straight from a model directory's tokenizer.json.

Owns the vocabulary as bytes: what each id adds to a text, so that streams can be decoded one token at a time. Knows
nothing of streams (`cluster.text.detokenizer`) nor of chats. Needs neither torch nor transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from cluster.errors import InvalidRequest

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: printable Latin-1 stands for itself, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


class Tokenizer:
    """`encode`, `decode` and the bytes of single tokens.

    Raises:
        ValueError: no tokenizer.json, or one whose decoder does not work token by token.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{directory} has no tokenizer.json; convert the model's tokenizer with its own tools")
        try:
            description = json.loads(path.read_text(encoding="utf-8"))
            self._fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exceptions
            raise ValueError(f"{path} cannot be read as a tokenizer: {error}; fetch the file again") from error
        self._fast.no_truncation()
        self._fast.no_padding()
        kinds = {step["type"]: step for step in _decoder_steps(description.get("decoder"))}
        self.is_byte_level = "ByteLevel" in kinds
        if not self.is_byte_level and not kinds.keys() & {"ByteFallback", "Metaspace"}:
            found = ", ".join(kinds) or "none"
            raise ValueError(
                f"{path}: decoder {found} is not supported; it must be ByteLevel, ByteFallback or Metaspace"
            )
        self.strips_leading_space = "Strip" in kinds or _metaspace_prepends(kinds.get("Metaspace"))
        added = description.get("added_tokens", [])
        self.special_ids = frozenset(token["id"] for token in added if token.get("special"))
        self._bytes: dict[int, bytes] = {}

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest entry of the vocabulary."""
        return max(map(len, self._fast.get_vocab(with_added_tokens=True)), default=1)

    @property
    def vocab_size(self) -> int:
        return self._fast.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Other threads run meanwhile: only the library's way of encoding a batch lets go of the interpreter's lock.

        Raises:
            InvalidRequest: half of a surrogate pair, which is no text and which JSON and command lines can smuggle in.
        """
        try:
            (encoding,) = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequest(
                "the text holds half of a surrogate pair, which is not valid Unicode; remove it", parameter="prompt"
            ) from error
        return encoding.ids

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, content: str) -> int | None:
        return self._fast.token_to_id(content)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text that has begun already; empty for ids outside the vocabulary."""
        found = self._bytes.get(token_id)
        if found is None:
            content = self._fast.id_to_token(token_id)
            found = self._bytes[token_id] = b"" if content is None else self._content_bytes(content)
        return found

    def _content_bytes(self, content: str) -> bytes:
        if self.is_byte_level:
            try:
                return bytes(_ALPHABET[char] for char in content)
            except KeyError:  # an added token, written as it is
                return content.encode()
        byte = _BYTE_TOKEN.fullmatch(content)
        return bytes([int(byte[1], 16)]) if byte else content.replace("\u2581", " ").encode()


def _decoder_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _metaspace_prepends(step: dict[str, Any] | None) -> bool:
    return step is not None and step.get("prepend_scheme", "always") != "never"
