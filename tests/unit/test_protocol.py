"""Messages between ingress and scheduler survive the wire, and nothing else is taken for one."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from cluster.errors import InvalidRequest, Overloaded, ProtocolError, Unavailable
from cluster.frames import HEADER
from cluster.protocol import (
    Abort,
    Failed,
    Generate,
    Refused,
    TokenBatch,
    decode_from_ingress,
    decode_from_scheduler,
    encode_message,
    pack_scores,
    pack_tokens,
    refusal_as_error,
    unpack_scores,
    unpack_tokens,
)
from scheduler.output import TokenLogprobs, int32
from scheduler.sampling_params import SamplingParams


def payload(message: object) -> bytes:
    return encode_message(message)[HEADER.size :]


def test_a_request_survives_the_wire_with_its_sampling_parameters() -> None:
    params = SamplingParams(n=2, temperature=0.7, seed=2**63 - 1, logit_bias={5: -1.5}, stop_token_ids=(1, 2))
    message = Generate(7, pack_tokens([1, 2, 3]), params, priority=-1, tenant="a", cache_salt="s", num_delivered=1)
    found = decode_from_ingress(payload(message))
    assert found == message
    assert unpack_tokens(found.token_ids) == [1, 2, 3]


def test_sampling_parameters_are_checked_again_on_arrival() -> None:
    raw = payload(Generate(7, b"", SamplingParams(temperature=1.25)))
    bad = raw.replace(msgspec.msgpack.encode(1.25), msgspec.msgpack.encode(-1.25))
    with pytest.raises(ProtocolError, match=r"temperature is -1\.25"):
        decode_from_ingress(bad)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91\xa4Evil", msgspec.msgpack.encode(["Abort", "x"])])
def test_anything_else_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_from_ingress(data)


def test_neither_side_may_say_the_other_s_words() -> None:
    with pytest.raises(ProtocolError):
        decode_from_ingress(payload(Failed(1, "x")))
    with pytest.raises(ProtocolError):
        decode_from_scheduler(payload(Abort(1)))


def test_a_step_costs_a_few_bytes_per_token() -> None:
    ids = list(range(1000, 1512))
    batch = TokenBatch(ids, [0] * 512, [40_000] * 512, {}, {}, {}, {})
    assert len(encode_message(batch)) < 8 * 512
    assert decode_from_scheduler(payload(batch)) == batch


def test_log_probabilities_survive_the_wire() -> None:
    scores = TokenLogprobs(
        int32([1, 2]), np.float32([-0.1, -2]), int32([1, 9]), int32([3, 4, 5, 6]).reshape(2, 2), np.ones((2, 2), "f4")
    )
    found = unpack_scores(pack_scores(scores))
    for name in ("token_ids", "logprobs", "ranks", "top_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(found, name), getattr(scores, name))


def test_log_probabilities_of_the_wrong_length_are_refused() -> None:
    scores = pack_scores(
        TokenLogprobs(int32([1]), np.float32([0]), int32([1]), int32().reshape(1, 0), np.empty((1, 0), "f4"))
    )
    scores.num_rows = 2
    with pytest.raises(ProtocolError, match="2 tokens"):
        unpack_scores(scores)


def test_ids_that_no_vocabulary_holds_are_the_client_s_error() -> None:
    with pytest.raises(InvalidRequest):
        pack_tokens([2**40])


@pytest.mark.parametrize(
    ("kind", "error", "status"),
    [("invalid", InvalidRequest, 400), ("overloaded", Overloaded, 429), ("unavailable", Unavailable, 503)],
)
def test_a_refusal_becomes_the_error_with_its_http_status(kind: str, error: type[Exception], status: int) -> None:
    found = refusal_as_error(Refused(1, kind, "why"))
    assert type(found) is error
    assert found.status == status
    assert str(found) == "why"
