"""Stop strings in a stream of text, found across token borders.

Owns the tail of the text that may be the beginning of a stop string and must not be shown yet. The match is the one
that a reader of single characters would see first, so the result does not depend on how the text was cut.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Feed text with `push`; once `found` is set the text is over and what follows is not looked at."""

    def __init__(self, strings: Sequence[str], *, include_in_output: bool = False) -> None:
        assert all(strings), "an empty stop string stops everything"
        self.found: str | None = None
        self._strings = tuple(strings)
        self._include = include_in_output
        self._longest = max(map(len, strings), default=0)
        self._held = ""

    def push(self, text: str) -> str:
        """The part that can be shown."""
        if not self._strings:
            return text
        if self.found is not None:
            return ""
        text = self._held + text
        matches = [(at + len(string), at, string) for string in self._strings if (at := text.find(string)) >= 0]
        if matches:
            end, start, self.found = min(matches)
            self._held = ""
            return text[: end if self._include else start]
        cut = len(text) - self._num_held(text)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The text is over: what was held back was no stop string."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        for length in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[-length:]
            if any(len(string) > length and string.startswith(tail) for string in self._strings):
                return length
        return 0
