"""What the Front reads off requests and replies without tokenising or building anything."""

import json

from hypothesis import given
from hypothesis import strategies as st

from orthrus_serve.policy.charge import ChargeEstimator
from orthrus_serve.serving.charging import CHARGED_ROUTES, MAX_PARSED_BYTES, ReplyMeter, learn, shape_of_request


def test_counts_are_read_off_the_body() -> None:
    shape = shape_of_request("/v1/completions", b'{"prompt": ["a", "b"], "n": 3}')
    assert shape is not None
    assert (shape.num_prompts, shape.num_outputs, shape.max_tokens) == (2, 6, 16)
    shape = shape_of_request("/v1/embeddings", b'{"input": [[1, 2, 3], [4]]}')
    assert shape is not None
    assert (shape.num_prompt_ids, shape.num_outputs) == (4, 0)
    assert shape_of_request("/v1/models", b"") is None


def test_a_huge_body_is_charged_by_its_length() -> None:
    body = b'{"input": ["' + b"x" * MAX_PARSED_BYTES + b'"]}'
    shape = shape_of_request("/v1/embeddings", body)
    assert shape is not None
    assert ChargeEstimator(max_prompt_tokens=100).estimate(shape) == len(body) // 4


@given(
    st.sampled_from(sorted(CHARGED_ROUTES)),
    st.binary(max_size=60) | st.text(alphabet='{}[]":,0a', max_size=60).map(str.encode),
)
def test_no_body_makes_the_front_fail(path: str, body: bytes) -> None:
    shape = shape_of_request(path, body)
    assert shape is not None
    assert ChargeEstimator().estimate(shape) >= 1


def test_usage_is_read_off_the_end_of_a_reply_however_it_was_cut_into_chunks() -> None:
    reply = json.dumps(
        {"data": [{"embedding": [0.5] * 2000}], "usage": {"prompt_tokens": 41, "total_tokens": 41}}
    ).encode()
    for size in (7, 500, 5000, len(reply)):
        meter = ReplyMeter()
        for begin in range(0, len(reply), size):
            meter.see(reply[begin : begin + size])
        assert meter.usage() == {"prompt_tokens": 41}


def test_the_estimator_learns_lengths_from_streams_without_usage() -> None:
    estimator = ChargeEstimator()
    shape = shape_of_request("/v1/chat/completions", b'{"messages": []}')
    assert shape is not None
    before = estimator.estimate(shape)
    for _ in range(20):
        meter = ReplyMeter()
        for _ in range(10):
            meter.see(b'data: {"choices": []}\n\n')
        learn(estimator, shape, meter)
    assert estimator.estimate(shape) < before
