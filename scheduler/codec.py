"""The bytes of the step contract: a fixed schema of little-endian integers, no pickle.

Every frame opens with a magic number, a version and the counts of what follows; arrays follow in the order of the
dataclass fields. Encoding is done once per step, whatever the number of ranks. Decoding trusts nothing: any
frame that is not exactly as long as its counts say is a `StepFormatError`.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler.output import (
    AdmittedSequence,
    Float32,
    Int32,
    PromptLogprobs,
    StepPlan,
    StepResult,
    TokenLogprobs,
    int32,
)
from scheduler.sampling_params import SamplingParams

VERSION = 1
PLAN_MAGIC = b"AP"
RESULT_MAGIC = b"AR"

_PLAN = struct.Struct("<2sHIQ6I")  # magic, version, epoch, step; released, admitted, copied, grown, prefill, decode
_RESULT = struct.Struct("<2sHIQ4I")  # magic, version, epoch, step; slots, logprob rows, logprob k, prompt chunks
_ADMITTED = struct.Struct("<iqqii4I")  # slot, seq_id, seed, prompt, cached; tokens, blocks, stop ids, biases
_SAMPLING = struct.Struct("<ii6dqii?ii")  # SamplingParams' numbers, in the order of `_sampling_numbers`
_PROMPT = struct.Struct("<iiII")  # slot, start; rows, k

_ABSENT = -1  # stands for None where None and 0 differ


class StepFormatError(ValueError):
    """A frame that does not follow the schema: the peer is another version, or not a peer at all."""


class _Reader:
    """A cursor over a frame that refuses to run past its end."""

    def __init__(self, frame: bytes | bytearray | memoryview) -> None:
        self.frame = memoryview(frame)
        self.offset = 0

    def _advance(self, num_bytes: int) -> int:
        start = self.offset
        self.offset += num_bytes
        if self.offset > len(self.frame):
            raise StepFormatError(f"frame of {len(self.frame)} bytes ends before byte {self.offset}")
        return start

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack_from(self.frame, self._advance(layout.size))

    def header(self, layout: struct.Struct, magic: bytes) -> tuple[Any, ...]:
        found, version, *rest = self.unpack(layout)
        if found != magic:
            raise StepFormatError(f"frame starts with {found!r}, not {magic!r}")
        if version != VERSION:
            raise StepFormatError(f"frame has version {version}, this process speaks {VERSION}; run one version")
        return tuple(rest)

    def _array(self, count: int, dtype: type[np.generic]) -> NDArray[Any]:
        return np.frombuffer(self.frame, dtype, count, self._advance(4 * count))

    def int32(self, count: int) -> Int32:
        return self._array(count, np.int32) if count else int32()

    def float32(self, count: int) -> Float32:
        return self._array(count, np.float32)

    def float64(self, count: int) -> NDArray[np.float64]:
        # Not aligned to 8 bytes in general, so it is copied.
        start = self._advance(8 * count)
        return np.frombuffer(bytes(self.frame[start : self.offset]), np.float64)

    def finish(self) -> None:
        if self.offset != len(self.frame):
            raise StepFormatError(f"frame has {len(self.frame) - self.offset} bytes too many")


def encode_plan(plan: StepPlan) -> bytes:
    """The frame of one step: 32 + 12 bytes, then 8 per decode row, 12 per prefill row, 8 per appended block."""
    parts: list[bytes] = [
        _PLAN.pack(
            PLAN_MAGIC,
            VERSION,
            plan.engine_epoch,
            plan.step,
            len(plan.released_slots),
            len(plan.admitted),
            len(plan.copied_from),
            len(plan.grown_slots),
            len(plan.prefill_slots),
            len(plan.decode_slots),
        )
    ]
    arrays = (
        plan.released_slots,
        plan.copied_from,
        plan.copied_to,
        plan.grown_slots,
        plan.grown_blocks,
        plan.prefill_slots,
        plan.prefill_starts,
        plan.prefill_num_tokens,
        plan.decode_slots,
        plan.decode_tokens,
    )
    parts.extend(array.tobytes() for array in arrays)
    for sequence in plan.admitted:
        parts.extend(_encode_admitted(sequence))
    return b"".join(parts)


def decode_plan(frame: bytes | bytearray | memoryview) -> StepPlan:
    """The plan in `frame`; its arrays are read-only views into it.

    Raises:
        StepFormatError: the frame does not follow the schema.
    """
    reader = _Reader(frame)
    header = reader.header(_PLAN, PLAN_MAGIC)
    epoch, step, num_released, num_admitted, num_copied, num_grown, num_prefill, num_decode = header
    plan = StepPlan(
        engine_epoch=epoch,
        step=step,
        released_slots=reader.int32(num_released),
        copied_from=reader.int32(num_copied),
        copied_to=reader.int32(num_copied),
        grown_slots=reader.int32(num_grown),
        grown_blocks=reader.int32(num_grown),
        prefill_slots=reader.int32(num_prefill),
        prefill_starts=reader.int32(num_prefill),
        prefill_num_tokens=reader.int32(num_prefill),
        decode_slots=reader.int32(num_decode),
        decode_tokens=reader.int32(num_decode),
    )
    plan.admitted = tuple(_decode_admitted(reader) for _ in range(num_admitted))
    reader.finish()
    return plan


def encode_result(result: StepResult) -> bytes:
    """The frame of one result: 32 bytes, then 8 per sampled token; log-probabilities only where asked for."""
    scores = result.logprobs
    parts = [
        _RESULT.pack(
            RESULT_MAGIC,
            VERSION,
            result.engine_epoch,
            result.step,
            len(result.slots),
            len(result.logprob_slots),
            scores.top_ids.shape[1] if scores else 0,
            len(result.prompt_logprobs),
        ),
        result.slots.tobytes(),
        result.tokens.tobytes(),
    ]
    if scores:
        parts.append(result.logprob_slots.tobytes())
        parts.extend(_encode_scores(scores))
    for chunk in result.prompt_logprobs:
        parts.append(_PROMPT.pack(chunk.slot, chunk.start, *chunk.scores.top_ids.shape))
        parts.extend(_encode_scores(chunk.scores))
    return b"".join(parts)


def decode_result(frame: bytes | bytearray | memoryview) -> StepResult:
    """The result in `frame`; its arrays are read-only views into it.

    Raises:
        StepFormatError: the frame does not follow the schema.
    """
    reader = _Reader(frame)
    epoch, step, num_slots, num_scored, k, num_chunks = reader.header(_RESULT, RESULT_MAGIC)
    result = StepResult(epoch, step, slots=reader.int32(num_slots), tokens=reader.int32(num_slots))
    if num_scored:
        result.logprob_slots = reader.int32(num_scored)
        result.logprobs = _decode_scores(reader, num_scored, k)
    chunks = []
    for _ in range(num_chunks):
        slot, start, num_rows, chunk_k = reader.unpack(_PROMPT)
        chunks.append(PromptLogprobs(slot, start, _decode_scores(reader, num_rows, chunk_k)))
    result.prompt_logprobs = tuple(chunks)
    reader.finish()
    return result


def _encode_scores(scores: TokenLogprobs) -> list[bytes]:
    arrays = (scores.token_ids, scores.logprobs, scores.ranks, scores.top_ids, scores.top_logprobs)
    return [array.tobytes() for array in arrays]


def _decode_scores(reader: _Reader, num_rows: int, k: int) -> TokenLogprobs:
    return TokenLogprobs(
        token_ids=reader.int32(num_rows),
        logprobs=reader.float32(num_rows),
        ranks=reader.int32(num_rows),
        top_ids=reader.int32(num_rows * k).reshape(num_rows, k),
        top_logprobs=reader.float32(num_rows * k).reshape(num_rows, k),
    )


def _encode_admitted(sequence: AdmittedSequence) -> list[bytes]:
    params = sequence.sampling_params
    biases = params.logit_bias
    return [
        _ADMITTED.pack(
            sequence.slot,
            sequence.seq_id,
            sequence.seed,
            sequence.num_prompt_tokens,
            sequence.num_cached_tokens,
            len(sequence.token_ids),
            len(sequence.block_table),
            len(params.stop_token_ids),
            len(biases),
        ),
        _SAMPLING.pack(*_sampling_numbers(params)),
        sequence.token_ids.tobytes(),
        sequence.block_table.tobytes(),
        np.array(params.stop_token_ids, np.int32).tobytes(),
        np.array(list(biases), np.int32).tobytes(),
        np.array(list(biases.values()), np.float64).tobytes(),
    ]


def _decode_admitted(reader: _Reader) -> AdmittedSequence:
    slot, seq_id, seed, num_prompt, num_cached, num_tokens, num_blocks, num_stop, num_bias = reader.unpack(_ADMITTED)
    numbers = reader.unpack(_SAMPLING)
    return AdmittedSequence(
        slot=slot,
        seq_id=seq_id,
        seed=seed,
        num_prompt_tokens=num_prompt,
        num_cached_tokens=num_cached,
        token_ids=reader.int32(num_tokens),
        block_table=reader.int32(num_blocks),
        sampling_params=_sampling_params(
            numbers,
            stop_token_ids=tuple(reader.int32(num_stop).tolist()),
            logit_bias=dict(zip(reader.int32(num_bias).tolist(), reader.float64(num_bias).tolist(), strict=True)),
        ),
    )


def _sampling_numbers(params: SamplingParams) -> tuple[Any, ...]:
    def or_absent(value: int | None) -> int:
        return _ABSENT if value is None else value

    return (
        params.n,
        params.top_k,
        params.temperature,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        or_absent(params.seed),
        or_absent(params.max_tokens),
        params.min_tokens,
        params.ignore_eos,
        or_absent(params.logprobs),
        or_absent(params.prompt_logprobs),
    )


def _sampling_params(
    numbers: tuple[Any, ...], *, stop_token_ids: tuple[int, ...], logit_bias: dict[int, float]
) -> SamplingParams:
    def or_none(value: int) -> int | None:
        return None if value == _ABSENT else value

    n, top_k, temperature, top_p, min_p, repetition, presence, frequency, seed, max_tokens, *rest = numbers
    min_tokens, ignore_eos, logprobs, prompt_logprobs = rest
    try:
        return SamplingParams(
            n=n,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition,
            presence_penalty=presence,
            frequency_penalty=frequency,
            logit_bias=logit_bias,
            seed=or_none(seed),
            max_tokens=or_none(max_tokens),
            min_tokens=min_tokens,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            logprobs=or_none(logprobs),
            prompt_logprobs=or_none(prompt_logprobs),
        )
    except ValueError as error:
        raise StepFormatError(f"sampling parameters out of range: {error}") from error
