"""A generation shared by two replicas: the body that each of them sees, and what the first hands to the second. Pure.

The first computes the prompt and one token, which nobody reads; the second fetches the prompt's KV and answers the request
as the client sent it, so every field that shapes the answer acts there and there only. Guards: a request whose KV could not be
handed over rightly is not handed over; what a replica is told to fetch comes from a Front, never from a client
(`request_check.py` refuses the field). Leaves out who is asked (`disagg.py`), and that both computed the same prompt
(`engine/kv_handover.py`).
"""

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from orthrus_serve.serving.error_shape import JSON_HEADERS
from orthrus_serve.serving.tunnel import Reply, Start, read_reply
from orthrus_serve.types import Half

# What the second replica is to fetch, in the words of the KV connector (vLLM's `kv_transfer_params`).
Handover = dict[str, Any]

FIELD = "kv_transfer_params"
# The connector of the first replica is asked to keep the prompt's KV until it is fetched.
ASK_TO_KEEP: Handover = {"do_remote_decode": True, "do_remote_prefill": False}
# They shape the answer, not the prompt: the first replica needs none of them, and some do not go with a single token.
ANSWER_FIELDS = frozenset({
    "stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens", "n", "logprobs", "top_logprobs", "echo",
    "stop", "stop_token_ids", "include_stop_str_in_output", "bad_words", "seed", "logit_bias", "allowed_token_ids",
    "response_format", "structured_outputs", "return_token_ids", "return_tokens_as_token_ids", "thinking_token_budget",
})  # fmt: skip


def keeps_whole(fields: Mapping[str, Any]) -> str | None:
    """Why one replica computes this request whole, as a word for counters; None when two may share it.

    Args:
        fields: a body of `/v1/completions` or `/v1/chat/completions` that was found valid.
    """
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and (len(prompt) != 1 if not _is_id(prompt[0]) else False):
        return "prompts"  # what is handed over is the KV of one prompt
    if (fields.get("n") or 1) > 1:
        return "n"  # ...fetched by one output
    if fields.get("prompt_logprobs") is not None or (fields.get("echo") and fields.get("logprobs") is not None):
        return "prompt_logprobs"  # they need the prompt computed where they are reported
    if fields.get("truncate_prompt_tokens") is not None:
        return "truncate_prompt_tokens"  # how much is kept may depend on `max_tokens`
    return None


def staged(body: bytes, stage: Half | None, handover: Handover | None) -> bytes | str:
    """The body that the app of a replica sees in this stage; or why the first replica has nothing to compute.

    Args:
        body: of a generation, found valid, as the client sent it.
        stage: None, and `decode` without a handover: the replica computes the request whole.
    """
    if stage == "prefill":
        return keeps_whole(json.loads(body)) or prefill_body(body)
    return body if handover is None else decode_body(body, handover)


def prefill_body(body: bytes) -> bytes:
    """The body that the first replica's app sees."""
    kept = {key: value for key, value in json.loads(body).items() if key not in ANSWER_FIELDS}
    return json.dumps({**kept, "max_tokens": 1, "stream": False, FIELD: ASK_TO_KEEP}).encode()


def decode_body(body: bytes, handover: Handover) -> bytes:
    """The body that the second replica's app sees."""
    return json.dumps({**json.loads(body), FIELD: handover}).encode()


async def prefill_reply(reply: AsyncGenerator[Start | bytes]) -> AsyncGenerator[Start | bytes]:
    """Of the first replica's reply, what the Front needs: the handover, or the error as it is."""
    try:
        whole = await read_reply(aiter(reply))
        if whole.status != 200:
            yield whole.status, whole.headers
            yield whole.body
            return
        yield 200, list(JSON_HEADERS)
        yield _told(handover=json.loads(whole.body).get(FIELD))
    finally:
        await reply.aclose()


async def whole_reply(reason: str) -> AsyncGenerator[Start | bytes]:
    """The first replica's reply where nothing can be handed over."""
    yield 200, list(JSON_HEADERS)
    yield _told(whole=reason)


def read_prefill(reply: Reply) -> Handover | None:
    """The handover that a first replica answered with; None when there is none."""
    handover: Handover | None = json.loads(reply.body).get("handover")
    return handover or None


def _told(**answer: Any) -> bytes:
    return json.dumps(answer).encode()


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
