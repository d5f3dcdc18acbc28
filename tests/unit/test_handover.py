"""Bodies of a generation that two replicas share: what the first sees, what the second sees, and what is not shared."""

import json
from typing import Any

import pytest

from orthrus_serve.serving.handover import ANSWER_FIELDS, ASK_TO_KEEP, keeps_whole, prefill_body, prefill_reply, staged
from orthrus_serve.serving.tunnel import Reply, Start, read_reply

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function"}]}
EVERYTHING: dict[str, Any] = {
    **CHAT, "stream": True, "stream_options": {"include_usage": True}, "max_completion_tokens": 90, "max_tokens": 90,
    "min_tokens": 7, "stop": ["."], "logprobs": True, "top_logprobs": 3, "n": 1, "seed": 5, "temperature": 0.5,
    "response_format": {"type": "json_object"}, "add_generation_prompt": False, "cache_salt": "x",
}  # fmt: skip


def test_the_first_replica_sees_what_shapes_the_prompt_and_one_token() -> None:
    seen = json.loads(prefill_body(json.dumps(EVERYTHING).encode()))
    assert seen == {
        **CHAT, "temperature": 0.5, "add_generation_prompt": False, "cache_salt": "x",
        "max_tokens": 1, "stream": False, "kv_transfer_params": ASK_TO_KEEP,
    }  # fmt: skip


def test_no_field_that_shapes_the_prompt_is_taken_from_the_first_replica() -> None:
    prompt_fields = {
        "model", "prompt", "messages", "tools", "tool_choice", "chat_template", "chat_template_kwargs", "documents",
        "add_generation_prompt", "continue_final_message", "add_special_tokens", "truncation_side", "cache_salt",
        "reasoning_effort", "include_reasoning",
    }  # fmt: skip
    assert not ANSWER_FIELDS & prompt_fields


def test_the_second_replica_sees_the_body_as_it_came_and_what_to_fetch() -> None:
    body = json.dumps(EVERYTHING).encode()
    seen = staged(body, "decode", {"remote_request_id": "r"})
    assert isinstance(seen, bytes)
    assert json.loads(seen) == {**EVERYTHING, "kv_transfer_params": {"remote_request_id": "r"}}
    assert staged(body, None, None) is body
    assert staged(body, "decode", None) is body


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": "a"}, None),
        ({"prompt": ["a"]}, None),
        ({"prompt": [5]}, None),
        ({"prompt": [5, 6]}, None),
        ({"prompt": [[5, 6]]}, None),
        ({"messages": []}, None),
        ({"prompt": "a", "echo": True}, None),
        ({"prompt": "a", "logprobs": 3}, None),
        ({"prompt": "a", "n": 1, "prompt_logprobs": None, "truncate_prompt_tokens": None}, None),
        ({"prompt": ["a", "b"]}, "prompts"),
        ({"prompt": [[5], [6]]}, "prompts"),
        ({"prompt": "a", "n": 2}, "n"),
        ({"prompt": "a", "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt": "a", "echo": True, "logprobs": 0}, "prompt_logprobs"),
        ({"prompt": "a", "truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
    ],
)
def test_what_one_replica_must_compute_is_not_shared(fields: dict[str, Any], reason: str | None) -> None:
    assert keeps_whole(fields) == reason
    seen = staged(json.dumps(fields).encode(), "prefill", None)
    assert (seen if isinstance(seen, str) else None) == reason


async def replied(*items: Start | bytes) -> Reply:
    async def app() -> Any:
        for item in items:
            yield item

    return await read_reply(aiter(prefill_reply(app())))


async def test_the_front_gets_the_handover_and_nothing_of_the_answer() -> None:
    answer = {"choices": [{"text": "secret"}], "kv_transfer_params": {"remote_request_id": "r"}}
    reply = await replied((200, [(b"content-type", b"application/json")]), json.dumps(answer).encode())
    assert (reply.status, json.loads(reply.body)) == (200, {"handover": {"remote_request_id": "r"}})


async def test_an_error_passes_as_it_is() -> None:
    reply = await replied((400, [(b"x", b"y")]), b'{"error": {}}')
    assert (reply.status, reply.headers, reply.body) == (400, [(b"x", b"y")], b'{"error": {}}')
