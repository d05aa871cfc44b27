"""One sequence: its tokens, how many of them are computed, and the blocks that hold their KV.

Owns token accounting. Does not know where blocks come from, what else is running, or what a worker is.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf
from enum import Enum, auto
from itertools import count
from typing import Any

from scheduler.cached_block import CachedBlock
from scheduler.prompt_scores import PromptScores
from scheduler.sampling_params import SamplingParams

DEFAULT_BLOCK_SIZE = 256

_sequence_ids = count()


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """A prompt and its continuation.

    `num_tokens` counts every known token and outlives `token_ids`, which a transferred decoding sequence does not
    carry. `num_cached_tokens` counts the tokens whose KV is in `block_table`, or will be once the steps sent so far are
    executed. `num_pending_tokens` counts tokens that such steps sample and that are not known here yet.

    Pickled, a prefilling sequence carries all its tokens, a decoding one only the last.

    Raises:
        ValueError: the prompt is empty.
    """

    __slots__ = (
        "admitted_step",
        "block_hashes",
        "block_size",
        "block_table",
        "cache_salt",
        "children",
        "index",
        "is_prefill",
        "last_token",
        "max_num_tokens",
        "num_cached_prompt_tokens",
        "num_cached_tokens",
        "num_pending_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_scheduled_tokens",
        "num_tokens",
        "owns_token_ids",
        "parent",
        "prefix_entries",
        "priority",
        "prompt_scores",
        "queue_key",
        "request_id",
        "sampling_params",
        "seed",
        "seq_id",
        "slot",
        "status",
        "stop_ids",
        "token_ids",
    )

    def __init__(
        self,
        token_ids: SequenceOf[int],
        sampling_params: SamplingParams = SamplingParams(),  # noqa: B008  frozen
        *,
        block_size: int = DEFAULT_BLOCK_SIZE,
        seq_id: int | None = None,
    ) -> None:
        if not token_ids:
            raise ValueError("the prompt is empty; give at least one token")
        self.seq_id = next(_sequence_ids) if seq_id is None else seq_id
        self.sampling_params = sampling_params
        self.block_size = block_size
        self.status = SequenceStatus.WAITING

        self.token_ids = list(token_ids)
        self.owns_token_ids = True
        self.last_token = self.token_ids[-1]
        self.num_tokens = len(self.token_ids)
        self.num_prompt_tokens = self.num_tokens

        self.is_prefill = True
        self.num_cached_tokens = 0
        self.num_scheduled_tokens = 0
        self.num_pending_tokens = 0
        self.block_table: list[int] = []

        # Set by the scheduler; they stay with it when the sequence is transferred.
        self.request_id: Hashable = self.seq_id
        self.index = 0
        self.seed = sampling_params.seed or 0
        self.priority = 0
        self.cache_salt = ""
        self.max_num_tokens = 0
        self.stop_ids: frozenset[int] = frozenset()
        self.queue_key: tuple[float, ...] = ()
        self.slot = -1
        self.admitted_step = -1
        self.num_preemptions = 0
        self.num_cached_prompt_tokens = -1
        self.block_hashes: list[bytes] = []
        self.prefix_entries: list[CachedBlock] = []
        self.prompt_scores: PromptScores | None = None
        self.parent: Sequence | None = None
        self.children: list[Sequence] = []

    def __len__(self) -> int:
        return self.num_tokens

    def __getitem__(self, key: Any) -> Any:
        return self.token_ids[key]

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.name}, "
            f"tokens {self.num_prompt_tokens}+{self.num_completion_tokens}, "
            f"cached {self.num_cached_tokens}, pending {self.num_pending_tokens}, blocks {len(self.block_table)})"
        )

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def num_completion_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_blocks(self) -> int:
        """Blocks that the known tokens fill, the last one perhaps in part."""
        return -(-self.num_tokens // self.block_size)

    @property
    def last_block_num_tokens(self) -> int:
        return self.num_tokens - (self.num_blocks - 1) * self.block_size

    def block(self, i: int) -> list[int]:
        """The tokens of block `i`."""
        assert 0 <= i < self.num_blocks, f"block {i} of {self.num_blocks}"
        return self.token_ids[i * self.block_size : (i + 1) * self.block_size]

    def append_token(self, token_id: int) -> None:
        if not self.owns_token_ids:
            self.token_ids, self.owns_token_ids = list(self.token_ids), True
        self.token_ids.append(token_id)
        self.last_token = token_id
        self.num_tokens += 1

    def __getstate__(self) -> tuple[Any, ...]:
        return (
            self.seq_id,
            self.sampling_params,
            self.block_size,
            self.status,
            self.num_tokens,
            self.num_prompt_tokens,
            self.num_cached_tokens,
            self.num_scheduled_tokens,
            self.is_prefill,
            self.block_table,
            self.token_ids if self.is_prefill else self.last_token,
        )

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        *fields, tokens = state
        seq_id, sampling_params, block_size, *_ = fields
        # The constructor sets what does not travel; a decoding sequence arrives with its last token only.
        token_ids = tokens if isinstance(tokens, list) else [tokens]
        Sequence.__init__(self, token_ids, sampling_params, block_size=block_size, seq_id=seq_id)
        (
            self.status,
            self.num_tokens,
            self.num_prompt_tokens,
            self.num_cached_tokens,
            self.num_scheduled_tokens,
            self.is_prefill,
            self.block_table,
        ) = fields[3:]
        if not self.is_prefill:
            self.token_ids = []
