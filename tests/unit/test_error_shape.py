"""Errors within a stream: whose they are is what vLLM's own event says."""

import json

import pytest

from orthrus_serve.serving.error_shape import has_error_event, has_failure_event, has_our_error_event, reshape_events


def event(code: object) -> bytes:
    error = {"message": "no token may follow (parameter=stop)", "type": "Any", "param": "stop", "code": code}
    return b"data: " + json.dumps({"error": error}).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("code", "kind"),
    [(400, "invalid_request_error"), (404, "not_found_error"), (500, "server_error"), (503, "server_error")]
    + [(code, "server_error") for code in (None, "400", 200, 4000, True, [400])],
)
def test_an_error_event_is_the_callers_where_vllm_says_so_and_else_the_servers(code: object, kind: str) -> None:
    chunk = b'data: {"choices": []}\n\n' + event(code) + b"data: [DONE]\n\n"
    assert has_error_event(chunk)
    reshaped = reshape_events(chunk)
    assert has_our_error_event(reshaped)
    assert has_failure_event(reshaped) == (kind == "server_error")
    before, _, after = reshaped.partition(b"event: error\ndata: ")
    assert before == b'data: {"choices": []}\n\n'
    error = json.loads(after.strip())["error"]
    assert (error["type"], error["param"]) == (kind, "stop")
    assert b"[DONE]" not in reshaped


def test_an_event_that_cannot_be_read_is_the_servers() -> None:
    reshaped = reshape_events(b'data: {"error": {"code": 400\n\n')
    assert b'"server_error"' in reshaped
