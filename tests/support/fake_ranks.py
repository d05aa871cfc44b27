"""Ranks without a model: they keep slots as real ones do and sample by a hash of everything before the token.

The next token depends on every token of the sequence, so a plan that is lost, repeated or applied to the wrong slot
changes the text, and `expected_tokens` knows what the text must be.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Sequence

import numpy as np

from cluster.errors import TransportError
from cluster.rank_channel import RankChannel
from cluster.transport import Address
from configs.schema import ClusterConfig
from scheduler.output import UNKNOWN_TOKEN, PromptLogprobs, StepPlan, StepResult, TokenLogprobs, int32

NUM_TOKENS = 256  # fake ranks sample ids below it


def next_token(token_ids: Sequence[int]) -> int:
    """Of a continuation: mostly printable ASCII, now and then any byte at all."""
    value = zlib.crc32(np.asarray(token_ids, np.int32).tobytes())
    return value % NUM_TOKENS if value % 16 == 0 else 32 + (value >> 8) % 95


def expected_tokens(prompt: Sequence[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def scores_of(token_ids: Sequence[int], k: int) -> TokenLogprobs:
    """Rank 1, log-probability -0.5, and as alternatives the ids that follow, at -1, -2, ..."""
    tokens, offsets = int32(list(token_ids)), np.arange(1, k + 1, dtype=np.int32)
    return TokenLogprobs(
        tokens,
        np.full(len(tokens), -0.5, np.float32),
        np.ones(len(tokens), np.int32),
        (tokens[:, None] + offsets) % NUM_TOKENS,
        np.tile(-offsets.astype(np.float32), (len(tokens), 1)),
    )


class FakeModel:
    """Executes plans. It checks what a real worker relies on: known slots, and steps and tokens in order."""

    def __init__(self, rank: int = 0, *, seconds_per_step: float = 0.0) -> None:
        self.rank = rank
        self.seconds_per_step = seconds_per_step
        self.tokens: dict[int, list[int]] = {}
        self.num_computed: dict[int, int] = {}
        self.wants_logprobs: dict[int, int | None] = {}
        self.prompt_to_score: dict[int, tuple[int, int]] = {}  # slot -> prompt tokens, alternatives
        self.num_steps = 0
        self.num_prefills: list[int] = []  # rows of prompts in each step
        self.blocked = threading.Event()  # set: the next step does not return before it is cleared
        self.broken = ""

    def execute(self, plan: StepPlan) -> StepResult | None:
        if self.broken:
            raise RuntimeError(self.broken)
        while self.blocked.is_set():
            time.sleep(0.005)
        time.sleep(self.seconds_per_step)
        assert plan.step == self.num_steps, "a step out of order"
        self.num_steps += 1
        self.num_prefills.append(len(plan.prefill_slots))
        self._take_over(plan)
        scored = self._score_prompts(plan)
        sampled = self._prefill(plan) + self._decode(plan)
        if self.rank:
            return None
        result = StepResult(
            plan.engine_epoch, plan.step, int32([slot for slot, _ in sampled]), int32([token for _, token in sampled])
        )
        result.prompt_logprobs = scored
        self._score(result, sampled)
        return result

    def _take_over(self, plan: StepPlan) -> None:
        for slot in plan.released_slots.tolist():
            self.tokens.pop(slot, None)
        for sequence in plan.admitted:
            self.tokens[sequence.slot] = sequence.token_ids.tolist()
            self.num_computed[sequence.slot] = sequence.num_cached_tokens
            params = sequence.sampling_params
            self.wants_logprobs[sequence.slot] = params.logprobs
            self.prompt_to_score.pop(sequence.slot, None)
            if params.prompt_logprobs is not None:
                self.prompt_to_score[sequence.slot] = (sequence.num_prompt_tokens, params.prompt_logprobs)

    def _prefill(self, plan: StepPlan) -> list[tuple[int, int]]:
        sampled = []
        for slot, count in zip(plan.prefill_slots.tolist(), plan.prefill_num_tokens.tolist(), strict=True):
            self.num_computed[slot] += count
            assert self.num_computed[slot] <= len(self.tokens[slot]), "prefill beyond what is known"
            if self.num_computed[slot] == len(self.tokens[slot]):
                sampled.append((slot, self._sample(slot)))
        return sampled

    def _decode(self, plan: StepPlan) -> list[tuple[int, int]]:
        sampled = []
        for slot, token in zip(plan.decode_slots.tolist(), plan.decode_tokens.tolist(), strict=True):
            assert token in (UNKNOWN_TOKEN, self.tokens[slot][-1]), "decode continues from another token"
            self.num_computed[slot] += 1
            sampled.append((slot, self._sample(slot)))
        return sampled

    def _sample(self, slot: int) -> int:
        token = next_token(self.tokens[slot])
        self.tokens[slot].append(token)
        return token

    def _score(self, result: StepResult, sampled: list[tuple[int, int]]) -> None:
        asked = [(slot, token) for slot, token in sampled if self.wants_logprobs[slot] is not None]
        if not asked:
            return
        k = max(self.wants_logprobs[slot] or 0 for slot, _ in asked)
        result.logprob_slots = int32([slot for slot, _ in asked])
        result.logprobs = scores_of([token for _, token in asked], k)

    def _score_prompts(self, plan: StepPlan) -> tuple[PromptLogprobs, ...]:
        """Computing a token scores the one after it, as long as that is one of the prompt."""
        scored = []
        for slot, count in zip(plan.prefill_slots.tolist(), plan.prefill_num_tokens.tolist(), strict=True):
            num_prompt, k = self.prompt_to_score.get(slot, (0, 0))
            start = self.num_computed[slot] + 1
            tokens = self.tokens[slot][start : min(start + count, num_prompt)]
            if tokens:
                scored.append(PromptLogprobs(slot, start, scores_of(tokens, k)))
        return tuple(scored)


class FakeRank:
    """A rank in a thread of the test's process, over a real socket."""

    def __init__(
        self, address: Address, *, token: str, rank: int, config: ClusterConfig, seconds_per_step: float = 0.0
    ) -> None:
        self.model = FakeModel(rank, seconds_per_step=seconds_per_step)
        self.orphaned: list[str] = []
        self.error: BaseException | None = None
        self.channel = RankChannel.connect(
            address,
            token=token,
            rank=rank,
            name=f"rank {rank} on node test, pid {1000 + rank}",
            engine_epoch=0,
            config=config,
            on_orphaned=self.orphaned.append,
        )
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self.channel.serve(self.model.execute)
        except (TransportError, RuntimeError, OSError, ValueError) as error:
            self.error = error

    def die(self) -> None:
        """What the kernel does for a killed process."""
        self.channel.connection.sock.shutdown(2)

    def fall_silent(self) -> None:
        """Like a stopped process: it holds its socket, and neither works nor pulses."""
        self.channel._send_lock.acquire()
        self.model.blocked.set()

    def has_ended(self, timeout: float = 2.0) -> bool:
        self._thread.join(timeout)
        return not self._thread.is_alive()


def main(host: str, port: str, token: str, rank: str) -> None:
    """A rank in a process of its own, to be killed."""
    name = f"rank {rank} in its own process"
    model = FakeModel(int(rank), seconds_per_step=0.01)
    channel = RankChannel.connect(
        Address(host, int(port)), token=token, rank=int(rank), name=name, engine_epoch=0, config=ClusterConfig()
    )
    channel.serve(model.execute)


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
