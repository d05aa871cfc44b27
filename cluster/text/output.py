"""The text of one sequence as it grows: detokenized, cut at stop strings, with what its tokens said in numbers.

Owns the order of the two steps and the end of a sequence as a client sees it. A stop string ends the text before the
scheduler knows; tokens that still arrive are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.text.detokenizer import IncrementalDetokenizer
from cluster.text.stop_strings import StopStrings
from cluster.text.tokenizer import Tokenizer


class OutputText:
    """`push` a token, get text. `finish_reason` is None until the sequence is over."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        stop_token_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None  # the string or the requested token id that ended it
        self.num_tokens = 0
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stop = StopStrings(stop, include_in_output=include_stop_str_in_output)
        self._stop_token_ids = stop_token_ids
        self._min_tokens = min_tokens
        self._include_stop = include_stop_str_in_output

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def push(self, token_id: int, finish_reason: str | None = None) -> str:
        """The text that this token makes certain; all that is left, where the engine says that it was the last."""
        assert self.finish_reason is None, "the sequence is over"
        self.num_tokens += 1
        ends_by_id = finish_reason == "stop" and token_id in self._stop_token_ids
        hidden = ends_by_id and not self._include_stop
        text = "" if hidden else self._detokenizer.push(token_id)
        if finish_reason is not None:
            text += self._detokenizer.flush()
        # Before min_tokens no stop string counts; the text up to there is shown as it is.
        text = self._stop.push(text) if self.num_tokens >= self._min_tokens else text
        if self._stop.found is not None:
            self.finish_reason, self.stop_reason = "stop", self._stop.found
        elif finish_reason is not None:
            text += self._stop.flush()
            self.finish_reason = finish_reason
            self.stop_reason = token_id if ends_by_id else None
        return text
