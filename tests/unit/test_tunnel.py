"""The tunnel without a cluster: any ASGI app on one side, the sequence of its reply on the other."""

import asyncio
import contextvars
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from orthrus_serve.policy.stream_pacing import StreamPacer
from orthrus_serve.serving.tunnel import Start, TruncatedReplyError, TunnelRequest, read_reply, run_app

JSON = [(b"content-type", b"application/json")]
SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]
REQUEST = TunnelRequest("POST", "/v1/completions", b"a=1", [(b"x", b"y")], b'{"prompt": "hi"}')


def start(status: int = 200, headers: Any = JSON) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(chunk: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": chunk, "more_body": more}


def replying(*messages: dict[str, Any], then: BaseException | None = None) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)
        if then is not None:
            raise then

    return app


async def reply_of(app: Any) -> tuple[int, dict[bytes, bytes], bytes]:
    items = [item async for item in run_app(app, REQUEST)]
    status, headers = items[0]
    return status, dict(headers), b"".join(items[1:])  # pyright: ignore


async def test_the_app_sees_the_request_as_it_was_sent() -> None:
    seen: dict[str, Any] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.update(scope, message=await receive())
        await send(start())
        await send(body(b"{}"))

    assert await reply_of(app) == (200, dict(JSON), b"{}")
    assert (seen["method"], seen["path"], seen["query_string"]) == ("POST", "/v1/completions", b"a=1")
    assert seen["headers"] == [(b"x", b"y")]
    assert seen["message"] == {"type": "http.request", "body": REQUEST.body, "more_body": False}
    assert seen["asgi"]["spec_version"] == "2.3"


async def test_chunks_that_wait_are_joined_and_none_is_lost() -> None:
    app = replying(start(headers=SSE), body(b"a", True), body(b"b", True), body(b"", True), body(b"c"))
    items = [item async for item in run_app(app, REQUEST)]
    assert items == [(200, SSE), b"abc"]


# One chunk of a stream, and then none for a quarter of an hour.
SLOWEST = 0.001


def telling(*parts: bytes, gap_s: float = 0.002, then: BaseException | None = None) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start(headers=SSE))
        for part in parts:
            await send(body(part, True))
            await asyncio.sleep(gap_s)
        if then is not None:
            raise then
        await send(body(b""))

    return app


async def test_within_the_gap_of_a_stream_chunks_are_joined_and_none_is_lost() -> None:
    events = [b"data: %d\n\n" % number for number in range(100)]
    began_s = asyncio.get_running_loop().time()
    items = [item async for item in run_app(telling(*events), REQUEST, pacer=StreamPacer(lambda: 50.0))]
    took_s = asyncio.get_running_loop().time() - began_s
    assert items[:2] == [(200, SSE), events[0]]  # the first waits for nothing
    assert b"".join(items[1:]) == b"".join(events)  # pyright: ignore
    assert 3 < len(items) <= 3 + took_s * 50.0  # the head, the first and the last besides


@pytest.mark.parametrize("then", [None, RuntimeError("broken")])
async def test_the_end_of_a_stream_does_not_wait_for_its_gap(then: BaseException | None) -> None:
    app = telling(b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n\n", then=then)
    async with asyncio.timeout(5):
        items = [item async for item in run_app(app, REQUEST, pacer=StreamPacer(lambda: SLOWEST))]
    assert items[:3] == [(200, SSE), b"data: 1\n\n", b"data: 2\n\ndata: 3\n\n"]
    assert [b"event: error" in item for item in items[3:]] == [True] * (then is not None)


async def test_an_answer_that_is_no_stream_is_not_paced() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start())
        for _ in range(5):
            await send(body(b"1", True))
            await asyncio.sleep(0.01)
        await send(body(b""))

    async with asyncio.timeout(5):
        items = [item async for item in run_app(app, REQUEST, pacer=StreamPacer(lambda: SLOWEST))]
    assert items == [(200, JSON), *[b"1"] * 5]


async def test_a_client_that_leaves_within_the_gap_leaves_nothing_behind() -> None:
    pacer, heard = StreamPacer(lambda: SLOWEST), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send(start(headers=SSE))
        await send(body(b"data: 1\n\n", True))
        await receive()
        heard.set()

    reply = run_app(app, REQUEST, pacer=pacer)
    assert [await anext(reply), await anext(reply)] == [(200, SSE), b"data: 1\n\n"]
    next_one = asyncio.create_task(anext(reply))
    await asyncio.sleep(0.01)
    assert pacer.num_sending == 1
    next_one.cancel()
    await asyncio.wait({next_one})
    await reply.aclose()
    async with asyncio.timeout(5):
        await heard.wait()
    assert pacer.num_sending == 0


async def test_an_app_that_raises_before_its_first_byte_is_a_500_in_openai_shape() -> None:
    status, headers, raw = await reply_of(replying(then=RuntimeError("secret")))
    error = json.loads(raw)["error"]
    assert status == 500
    assert headers[b"content-type"] == b"application/json"
    assert set(error) == {"message", "type", "param", "code"}
    assert "secret" not in error["message"]


@pytest.mark.parametrize("joined", [True, False])
async def test_an_error_event_of_vllm_ends_the_stream_in_our_shape(joined: bool) -> None:
    events = [
        b'data: {"text": "{\\"error\\": 1}"}\n\n',
        b'data: {"error": {"message": "no", "code": 500}}\n\n',
        b"data: [DONE]\n\n",
    ]
    if not joined:

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send(start(headers=SSE))
            for event in events:
                await asyncio.sleep(0.001)
                await send(body(event, True))
            await send(body(b""))

    else:
        app = replying(start(headers=SSE), body(b"".join(events)))
    _, _, raw = await reply_of(app)
    error = b'{"error":{"message":"no","type":"server_error","param":null,"code":null}}'
    assert raw == events[0] + b"event: error\ndata: " + error + b"\n\n"


@pytest.mark.parametrize("then", [RuntimeError("broken"), None])
async def test_a_stream_that_breaks_off_ends_in_an_error_event(then: BaseException | None) -> None:
    _, _, raw = await reply_of(replying(start(headers=SSE), body(b'data: {"x":1}\n\n', True), then=then))
    first, last = raw.decode().strip().split("\n\n")
    assert first == 'data: {"x":1}'
    event, data = last.split("\n")
    assert event == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "server_error"
    assert b"[DONE]" not in raw


async def test_any_other_body_that_breaks_off_is_an_error_and_not_a_short_answer() -> None:
    with pytest.raises(TruncatedReplyError):
        await reply_of(replying(start(), body(b'{"a":', True), then=RuntimeError("broken")))


@pytest.mark.parametrize(
    ("raw", "message", "param", "code"),
    [
        (b'{"error":{"message":"no","type":"BadRequestError","param":"n","code":400}}', "no", "n", None),
        (b'{"error":{"message":"bad n. (parameter=n, value=5)","param":"n","code":400}}', "bad n.", "n", None),
        (b'{"detail":"Not Found"}', "Not Found", None, None),
        (b'{"detail":[{"loc":["body"]}]}', '[{"loc": ["body"]}]', None, None),
        (b'{"error":"plain"}', "plain", None, None),
        (b"Internal Server Error", "Internal Server Error", None, None),
        (b"[1]", "[1]", None, None),
        (b"", "The request failed with status 400.", None, None),
        (b"\xff", "\ufffd", None, None),
        (
            json.dumps({"error": {"message": "2 validation errors:\n  {'type': 'list_type', 'loc': 'body.stop', 'msg': "
             "'Input should be a list', 'input': '5'}\n  {'type': 'x', 'loc': 'body.y', 'msg': \"z\", 'input': 5}"}}).encode(),
            "stop: Input should be a list.", "stop", None,
        ),
        (
            b'{"error":{"message":"This model\'s maximum context length is 9 tokens.","param":"input_tokens"}}',
            "This model's maximum context length is 9 tokens.", "prompt", "context_length_exceeded",
        ),
        (
            b'{"error":{"message":"max_tokens must be at least 1, got 0. (parameter=max_tokens)","param":"max_tokens"}}',
            "The prompt fills the model's whole context, which leaves no room for an answer. Please shorten it.",
            "prompt", "context_length_exceeded",
        ),
        (b'{"error":{"message":"The decoder prompt cannot be empty"}}', "The decoder prompt cannot be empty", "prompt", None),
    ],
)  # fmt: skip
async def test_errors_of_the_app_are_put_into_openai_shape(
    raw: bytes, message: str, param: str | None, code: str | None
) -> None:
    headers = [*JSON, (b"content-length", b"3"), (b"retry-after", b"7")]
    status, sent, got = await reply_of(replying(start(400, headers), body(raw)))
    expected = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    assert (status, json.loads(got)) == (400, {"error": expected})
    assert sent[b"retry-after"] == b"7"
    assert b"content-length" not in sent


async def test_a_client_that_leaves_is_told_to_the_app_which_is_not_cancelled() -> None:
    heard: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send(start(headers=SSE))
        await send(body(b"data: 1\n\n", True))
        message = await receive()
        await asyncio.sleep(0)  # would raise if the task were cancelled
        await send(body(b"nobody reads this", True))
        heard.append(message["type"])

    reply = run_app(app, REQUEST)
    assert await anext(reply) == (200, SSE)
    assert await anext(reply) == b"data: 1\n\n"
    await reply.aclose()
    await asyncio.sleep(0.01)
    assert heard == ["http.disconnect"]


async def test_the_app_runs_in_the_given_context() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
    context = contextvars.copy_context()
    context.run(variable.set, 7)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start())
        await send(body(str(variable.get()).encode()))

    items = [item async for item in run_app(app, REQUEST, context=context)]
    assert items[1] == b"7"
    assert variable.get() == 0


# --- front side -----------------------------------------------------------------------------------------------------


async def stream(*items: Start | bytes, then: BaseException | None = None) -> AsyncIterator[Start | bytes]:
    for item in items:
        yield item
    if then is not None:
        raise then


async def test_a_body_is_read_whole_before_anything_may_be_sent() -> None:
    reply = await read_reply(stream((200, JSON), b"ab", b"cd"))
    assert (reply.status, reply.body, reply.rest) == (200, b"abcd", None)
    with pytest.raises(ConnectionError):
        await read_reply(stream((200, JSON), b"ab", then=ConnectionError()))


async def test_an_event_stream_is_held_until_its_first_chunk_and_no_longer() -> None:
    reply = await read_reply(stream((200, SSE), b"data: 1\n\n", b"data: 2\n\n"))
    assert reply.body == b"data: 1\n\n"
    assert reply.rest is not None
    assert [chunk async for chunk in reply.rest] == [b"data: 2\n\n"]
    with pytest.raises(ConnectionError):
        await read_reply(stream((200, SSE), then=ConnectionError()))


async def test_a_reply_that_never_begins_is_truncated() -> None:
    with pytest.raises(TruncatedReplyError):
        await read_reply(stream())
