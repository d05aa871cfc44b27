"""The sampler's parameters are checked once, at the door."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.sampling_params import MAX_LOGPROBS, MAX_SEED, SamplingParams


@pytest.mark.parametrize(
    ("name", "lowest", "highest"),
    [
        ("n", 1, 128),
        ("temperature", 0.0, 100.0),
        ("top_k", 0, 2**31 - 1),
        ("top_p", 1e-9, 1.0),
        ("min_p", 0.0, 1.0),
        ("repetition_penalty", 1e-3, 1e3),
        ("presence_penalty", -100.0, 100.0),
        ("frequency_penalty", -100.0, 100.0),
        ("seed", 0, MAX_SEED),
        ("max_tokens", 1, 2**31 - 1),
        ("logprobs", 0, MAX_LOGPROBS),
        ("prompt_logprobs", 0, MAX_LOGPROBS),
    ],
)
def test_a_value_may_be_at_either_end_of_its_range_and_no_further(name: str, lowest: float, highest: float) -> None:
    beyond = 1 if isinstance(lowest, int) else 0.5
    for value in (lowest, highest):
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in (lowest - beyond, highest + beyond):
        with pytest.raises(ValueError, match=rf"{name} is .*; give a value from"):
            SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1", None, True])
def test_a_number_must_be_a_finite_number(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs"])
@pytest.mark.parametrize("value", [1.0, "1", True])
def test_a_count_must_be_a_whole_number(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a whole number"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["n", "temperature", "seed", "max_tokens"])
def test_a_number_beyond_any_float_is_out_of_range(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} is 1000.*; give a value from"):
        SamplingParams(**{name: 10**400})


def test_more_tokens_cannot_be_required_than_are_allowed() -> None:
    with pytest.raises(ValueError, match="min_tokens 5 is more than max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=5, max_tokens=None).min_tokens == 5


def test_a_bias_is_checked_for_each_token() -> None:
    assert SamplingParams(logit_bias={7: -100.0}).logit_bias == {7: -100.0}
    with pytest.raises(ValueError, match=r"logit_bias\[7\] is 101"):
        SamplingParams(logit_bias={3: 1.0, 7: 101.0})


def test_temperature_zero_is_greedy_and_nothing_else_is() -> None:
    assert SamplingParams(temperature=0.0).is_greedy
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=1e-6).is_greedy


@pytest.mark.parametrize("change", [{"repetition_penalty": 1.1}, {"presence_penalty": -1}, {"frequency_penalty": 0.1}])
def test_any_one_penalty_counts_as_penalties(change: dict[str, Any]) -> None:
    assert not SamplingParams().has_penalties
    assert SamplingParams(**change).has_penalties


def test_parameters_cannot_change_after_the_door() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.0  # type: ignore[misc]


@given(
    st.dictionaries(
        st.sampled_from([field.name for field in dataclasses.fields(SamplingParams) if field.name != "logit_bias"]),
        st.none() | st.integers() | st.floats(),
        max_size=3,
    ).filter(lambda changes: not {"stop_token_ids", "ignore_eos"} & changes.keys())
)
def test_any_numbers_give_parameters_or_a_value_error(changes: dict[str, Any]) -> None:
    try:
        params = SamplingParams(**changes)
    except ValueError:
        return
    assert dataclasses.replace(params) == params
