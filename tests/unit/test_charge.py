"""What a request is charged before anybody has tokenised it."""

import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orthrus_serve.policy.charge import (
    FIRST_OUTPUT_TOKENS,
    MAX_CHARGE_TOKENS,
    NUM_OUTPUTS_REMEMBERED,
    BytesPerToken,
    ChargeEstimator,
    OutputLengths,
    RequestShape,
    shape_of,
)

any_int = st.integers(-(10**30), 10**30)
json_values = st.recursive(
    st.none() | st.booleans() | any_int | st.floats() | st.text("a1", max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("a1", max_size=8), inner, max_size=4),
    max_leaves=12,
)
fields = st.sampled_from(["input", "prompt", "messages", "n", "max_tokens", "max_completion_tokens"])
kinds = st.sampled_from(["generate", "embed"])
shapes = st.builds(RequestShape, kinds, any_int, st.none() | any_int, any_int, any_int, st.none() | any_int)
lessons = st.lists(st.tuples(shapes, any_int, any_int), max_size=8)


def taught(lessons):
    estimator = ChargeEstimator()
    for shape, num_prompt_tokens, num_output_tokens in lessons:
        estimator.learn_prompt(shape, num_prompt_tokens)
        estimator.learn_output(num_output_tokens)
    return estimator


@given(kinds, st.dictionaries(fields, json_values), any_int, lessons)
def test_any_json_body_is_charged_a_positive_bounded_whole_number(kind, body, body_bytes, lessons):
    charge = taught(lessons).estimate(shape_of(kind, body, body_bytes))
    assert type(charge) is int
    assert 1 <= charge <= MAX_CHARGE_TOKENS


@given(shapes, lessons)
def test_any_shape_is_charged_a_positive_bounded_whole_number(shape, lessons):
    charge = taught(lessons).estimate(shape)
    assert type(charge) is int
    assert 1 <= charge <= MAX_CHARGE_TOKENS


@given(kinds, st.integers(0, 10**12), st.integers(0, 10**12), st.integers(0, 50), lessons)
def test_a_larger_body_is_never_charged_less(kind, small, large, num_outputs, lessons):
    small, large = sorted((small, large))
    estimator = taught(lessons)
    charges = [estimator.estimate(RequestShape(kind, size, None, 1, num_outputs)) for size in (small, large)]
    assert charges == sorted(charges)


@given(st.integers(0, 10**6), st.integers(0, 10**6), lessons)
def test_a_larger_limit_is_never_charged_less(small, large, lessons):
    small, large = sorted((small, large))
    estimator = taught(lessons)
    charges = [estimator.estimate(RequestShape("generate", 100, None, 1, 1, limit)) for limit in (small, large)]
    assert charges == sorted(charges)


@given(st.lists(st.tuples(any_int, any_int), max_size=50))
def test_the_ratio_stays_a_positive_finite_number(observations):
    ratio = BytesPerToken()
    for body_bytes, num_tokens in observations:
        ratio.observe(body_bytes, num_tokens)
    assert math.isfinite(ratio.ratio)
    assert ratio.ratio > 0


def test_the_ratio_follows_the_traffic_of_its_own_kind():
    estimator = ChargeEstimator()
    body = RequestShape("embed", 6000)
    for _ in range(500):
        estimator.learn_prompt(body, 2000)
    assert estimator.estimate(body) == pytest.approx(2000, rel=0.02)
    assert estimator.estimate(RequestShape("generate", 6000)) == 1500


def test_a_prompt_in_token_ids_is_counted_and_does_not_disturb_the_ratio():
    estimator = ChargeEstimator()
    shape = shape_of("embed", {"input": [11, 12, 13, 14]}, 300)
    estimator.learn_prompt(shape, 4)
    assert estimator.estimate(shape) == 4
    assert estimator.estimate(RequestShape("embed", 4000)) == 1000


@pytest.mark.parametrize(
    ("prompt", "num_prompts", "ids"),
    [
        ("text", 1, None),
        (["one", "two"], 2, None),
        ([5, 6, 7], 1, 3),
        ([[5, 6], [7]], 2, 3),
        ([[5, 6], "text"], 2, None),
        ([], 1, None),
        ([[]], 1, None),
        ([True], 1, None),
        ([[[5]]], 1, None),
    ],
)
def test_inputs_are_counted_as_the_api_reads_them(prompt, num_prompts, ids):
    shape = shape_of("embed", {"input": prompt}, 100)
    assert (shape.num_prompts, shape.num_prompt_ids) == (num_prompts, ids)


def test_a_list_of_prompts_is_charged_whole():
    estimator = ChargeEstimator()
    one = shape_of("generate", {"prompt": "x" * 400, "max_tokens": 10}, 400)
    two = shape_of("generate", {"prompt": ["x" * 400] * 2, "max_tokens": 10, "n": 3}, 800)
    assert estimator.estimate(one) == 100 + 10
    assert estimator.estimate(two) == 200 + 2 * 3 * 10


def test_ids_beside_messages_do_not_make_a_chat_cheap():
    shape = shape_of("generate", {"messages": [{"role": "user", "content": "x" * 4000}], "prompt": [1]}, 4100)
    assert shape.num_prompt_ids is None


def test_the_newer_name_of_the_limit_wins_and_the_route_has_the_last_word():
    assert shape_of("generate", {"max_completion_tokens": 5, "max_tokens": 9}, 10).max_tokens == 5
    assert shape_of("generate", {"max_tokens": None}, 10, 16).max_tokens == 16
    assert shape_of("generate", {"max_tokens": "many"}, 10).max_tokens is None


def test_without_a_limit_a_generation_is_charged_what_outputs_usually_take_not_the_whole_context():
    estimator = ChargeEstimator(max_prompt_tokens=100_000)
    chat = RequestShape("generate", 0, num_outputs=1)
    assert estimator.estimate(chat) == FIRST_OUTPUT_TOKENS
    for length in range(1, 101):
        estimator.learn_output(length)
    assert estimator.estimate(chat) == 70


def test_an_input_is_never_charged_more_than_the_longest_prompt():
    estimator = ChargeEstimator(max_prompt_tokens=2048)
    assert estimator.estimate(RequestShape("embed", 10**9, None, 3)) == 3 * 2048


def test_output_lengths_are_remembered_for_a_bounded_time_in_bounded_memory():
    outputs = OutputLengths()
    for _ in range(NUM_OUTPUTS_REMEMBERED):
        outputs.observe(10_000)
    size = sys.getsizeof(outputs._sorted)
    for _ in range(NUM_OUTPUTS_REMEMBERED):
        outputs.observe(5)
    assert outputs.expected == 5
    assert sys.getsizeof(outputs._sorted) <= size
    assert len(outputs._sorted) == len(outputs._recent) == NUM_OUTPUTS_REMEMBERED
