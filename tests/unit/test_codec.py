"""The step contract's bytes: what goes in comes out, nothing malformed comes through, and a step stays small."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.codec import StepFormatError, decode_plan, decode_result, encode_plan, encode_result
from scheduler.output import (
    UNKNOWN_TOKEN,
    AdmittedSequence,
    PromptLogprobs,
    StepPlan,
    StepResult,
    TokenLogprobs,
    int32,
)
from scheduler.sampling_params import MAX_SEED, SamplingParams

INT32 = st.integers(-(2**31), 2**31 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False)


def arrays(size: int | None = None) -> st.SearchStrategy[Any]:
    return st.lists(INT32, min_size=size or 0, max_size=5 if size is None else size).map(int32)


def alike(draw: st.DrawFn, num_arrays: int) -> list[Any]:
    """Arrays of one length."""
    size = draw(st.integers(0, 5))
    return [draw(arrays(size)) for _ in range(num_arrays)]


sampling_params = st.builds(
    SamplingParams,
    n=st.integers(1, 128),
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(1e-9, 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(1e-3, 1e3),
    presence_penalty=st.floats(-100, 100),
    frequency_penalty=st.floats(-100, 100),
    logit_bias=st.dictionaries(INT32, st.floats(-100, 100), max_size=3),
    seed=st.none() | st.integers(0, MAX_SEED),
    max_tokens=st.none() | st.integers(100, 2**31 - 1),
    min_tokens=st.integers(0, 100),
    stop_token_ids=st.lists(INT32, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
)
admitted = st.builds(
    AdmittedSequence,
    slot=INT32,
    seq_id=st.integers(0, 2**63 - 1),
    seed=st.integers(0, MAX_SEED),
    num_prompt_tokens=INT32,
    num_cached_tokens=INT32,
    token_ids=arrays(),
    block_table=arrays(),
    sampling_params=sampling_params,
)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    copied, grown, prefill, decode = (alike(draw, count) for count in (2, 2, 3, 2))
    return StepPlan(
        engine_epoch=draw(st.integers(0, 2**32 - 1)),
        step=draw(st.integers(0, 2**64 - 1)),
        released_slots=draw(arrays()),
        admitted=tuple(draw(st.lists(admitted, max_size=2))),
        copied_from=copied[0],
        copied_to=copied[1],
        grown_slots=grown[0],
        grown_blocks=grown[1],
        prefill_slots=prefill[0],
        prefill_starts=prefill[1],
        prefill_num_tokens=prefill[2],
        decode_slots=decode[0],
        decode_tokens=decode[1],
    )


@st.composite
def scores(draw: st.DrawFn, rows: int) -> TokenLogprobs:
    k = draw(st.integers(0, 3))

    def floats(size: int) -> Any:
        return np.array(draw(st.lists(FLOAT32, min_size=size, max_size=size)), np.float32)

    return TokenLogprobs(
        token_ids=draw(arrays(rows)),
        logprobs=floats(rows),
        ranks=draw(arrays(rows)),
        top_ids=draw(arrays(rows * k)).reshape(rows, k),
        top_logprobs=floats(rows * k).reshape(rows, k),
    )


@st.composite
def results(draw: st.DrawFn) -> StepResult:
    slots, tokens = alike(draw, 2)
    result = StepResult(draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, 2**64 - 1)), slots, tokens)
    if draw(st.booleans()):
        result.logprob_slots = draw(arrays(draw(st.integers(1, 3))))
        result.logprobs = draw(scores(len(result.logprob_slots)))
    chunks = draw(st.lists(st.tuples(INT32, INT32, st.integers(0, 3).flatmap(scores)), max_size=2))
    result.prompt_logprobs = tuple(PromptLogprobs(*chunk) for chunk in chunks)
    return result


def plain(value: Any) -> Any:
    """Nested tuples and lists, so that objects full of arrays compare by value, shape and type."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tolist()
    if dataclasses.is_dataclass(value):
        return [plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def decoding_plan(num_seqs: int, *, num_grown: int = 0) -> StepPlan:
    slots = np.arange(num_seqs, dtype=np.int32)
    return StepPlan(
        engine_epoch=1,
        step=2**40,
        grown_slots=slots[:num_grown],
        grown_blocks=slots[:num_grown],
        decode_slots=slots,
        decode_tokens=np.full(num_seqs, UNKNOWN_TOKEN, np.int32),
    )


def example_plan() -> StepPlan:
    plan = decoding_plan(3, num_grown=1)
    params = SamplingParams(stop_token_ids=(1, 2), logit_bias={5: 0.5})
    plan.admitted = (AdmittedSequence(1, 2, 3, 4, 0, int32([9, 8, 7, 6]), int32([0]), params),)
    return plan


def example_result() -> StepResult:
    top_ids, top_logprobs = int32([1, 2]).reshape(1, 2), np.zeros((1, 2), np.float32)
    row = TokenLogprobs(int32([1]), np.zeros(1, np.float32), int32([1]), top_ids, top_logprobs)
    return StepResult(1, 2, int32([0, 1]), int32([5, 6]), int32([1]), row, (PromptLogprobs(0, 1, row),))


FRAMES = [(decode_plan, encode_plan(example_plan())), (decode_result, encode_result(example_result()))]
Decoder = Callable[[bytes], Any]


@given(plans())
@settings(max_examples=50)
def test_a_plan_comes_out_as_it_went_in(plan: StepPlan) -> None:
    assert plain(decode_plan(encode_plan(plan))) == plain(plan)


@given(results())
@settings(max_examples=50)
def test_a_result_comes_out_as_it_went_in(result: StepResult) -> None:
    assert plain(decode_result(encode_result(result))) == plain(result)


def test_decoded_arrays_cannot_be_written_to() -> None:
    with pytest.raises(ValueError, match="read-only"):
        decode_plan(encode_plan(decoding_plan(2))).decode_slots[0] = 1


@pytest.mark.parametrize(("decode", "frame"), FRAMES)
def test_a_frame_cut_short_anywhere_is_refused(decode: Decoder, frame: bytes) -> None:
    for length in range(len(frame)):
        with pytest.raises(StepFormatError):
            decode(frame[:length])


@pytest.mark.parametrize(("decode", "frame"), FRAMES)
def test_a_frame_with_a_byte_too_many_is_refused(decode: Decoder, frame: bytes) -> None:
    with pytest.raises(StepFormatError, match="1 bytes too many"):
        decode(frame + b"\0")


@pytest.mark.parametrize(("decode", "frame"), FRAMES)
def test_a_frame_of_another_kind_or_version_is_refused(decode: Decoder, frame: bytes) -> None:
    with pytest.raises(StepFormatError, match="frame starts with b'XX'"):
        decode(b"XX" + frame[2:])
    with pytest.raises(StepFormatError, match="version 999, this process speaks"):
        decode(frame[:2] + struct.pack("<H", 999) + frame[4:])
    other = decode_result if decode is decode_plan else decode_plan
    with pytest.raises(StepFormatError):
        other(frame)


@pytest.mark.parametrize(("decode", "frame"), FRAMES)
def test_counts_far_beyond_the_frame_are_refused_before_memory_is_taken(decode: Decoder, frame: bytes) -> None:
    for offset in range(16, 32, 4):
        with pytest.raises(StepFormatError):
            decode(frame[:offset] + struct.pack("<I", 2**32 - 1) + frame[offset + 4 :])


@pytest.mark.parametrize(("decode", "frame"), FRAMES)
@given(data=st.data())
@settings(max_examples=100)
def test_a_garbled_frame_is_decoded_or_refused_and_nothing_else(
    decode: Decoder, frame: bytes, data: st.DataObject
) -> None:
    garbled = bytearray(frame)
    for _ in range(data.draw(st.integers(1, 4))):
        garbled[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(garbled))
    except StepFormatError:
        return


@given(st.binary(max_size=200))
def test_any_bytes_at_all_are_refused_by_the_format_error_alone(frame: bytes) -> None:
    for decode in (decode_plan, decode_result):
        with pytest.raises(StepFormatError):
            decode(frame)


def test_sampling_parameters_out_of_range_do_not_come_through() -> None:
    frame = encode_plan(example_plan())
    temperature = struct.pack("<d", SamplingParams().temperature)
    at = frame.index(temperature)
    with pytest.raises(StepFormatError, match="sampling parameters out of range: temperature"):
        decode_plan(frame[:at] + struct.pack("<d", -1.0) + frame[at + 8 :])


def test_a_step_of_512_decoding_sequences_takes_at_most_16_bytes_each() -> None:
    assert len(encode_plan(decoding_plan(512))) <= 16 * 512


def test_a_step_in_which_every_eighth_sequence_gains_a_block_still_does() -> None:
    assert len(encode_plan(decoding_plan(512, num_grown=64))) <= 16 * 512


def test_the_answer_to_512_decoding_sequences_takes_at_most_16_bytes_each() -> None:
    slots = np.arange(512, dtype=np.int32)
    assert len(encode_result(StepResult(1, 2, slots, slots))) <= 16 * 512
