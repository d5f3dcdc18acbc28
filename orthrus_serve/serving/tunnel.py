"""The ASGI tunnel: carries one HTTP request from the Front to an ASGI app that runs inside an engine replica.

Replica side (`run_app`): runs the app for one request and yields `(status, headers)`, then body chunks. Front side
(`read_reply`): reads that sequence and decides when the first byte may go to the client.

Guards: an error of the app becomes a 500 before the first byte, an SSE error event after it, and never a silent truncation;
a client that left is told to the app as `http.disconnect`. Leaves out what the app is, how the sequence travels (a Ray Serve
handle call), and which paths exist.
"""

import asyncio
import contextlib
import contextvars
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from orthrus_serve.errors import RequestError
from orthrus_serve.policy.stream_pacing import UNPACED, StreamPacer
from orthrus_serve.serving.error_shape import (
    JSON_HEADERS,
    error_bytes,
    has_error_event,
    has_failure_event,
    reshape_error,
    reshape_events,
    sse_error_event,
)
from orthrus_serve.telemetry.log import event_log

log = event_log(__name__)

Header = tuple[bytes, bytes]
Start = tuple[int, list[Header]]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

# How long an app may take to act on `http.disconnect` before its task is cancelled. vLLM's handlers run in tasks of their own,
# which a cancelled outer task would orphan: so the message comes first, and the cancellation is a last resort.
DISCONNECT_GRACE_S = 5.0
# A replica whose engine died marks its answer with this header, and the Front asks another one. It never reaches a client.
GONE_HEADER = b"x-orthrus-replica-gone"
# The status beside that mark: whether the engine never saw the request, or was working on it when it died.
UNSEEN_STATUS, LOST_STATUS = 503, 502
INTERNAL_ERROR = RequestError(500, "The server failed to answer this request.", code="internal_error")


class TruncatedReplyError(Exception):
    """The app, or the replica under it, ended before its reply was complete."""


# Where a route's text is: the field to name in errors about its length.
PROMPT_FIELDS = {"/v1/embeddings": "input", "/v1/completions": "prompt", "/v1/chat/completions": "messages"}


@dataclass(frozen=True)
class TunnelRequest:
    """One HTTP request with its whole body. `query` and `headers` are raw bytes as ASGI has them."""

    method: str
    path: str
    query: bytes
    headers: list[Header]
    body: bytes

    def scope(self, app: ASGIApp) -> dict[str, Any]:
        """The ASGI scope of this request. Version 2.3: before 2.4, Starlette listens for `http.disconnect` while it streams;
        from 2.4 on it waits for `send` to raise, which our `send` never does."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "root_path": "",
            "headers": self.headers,
            "client": ("127.0.0.1", 0),
            "server": ("orthrus", 80),
            "app": app,
            "state": {},
        }


def is_event_stream(headers: list[Header]) -> bool:
    """Whether a reply with these headers is a stream of server-sent events."""
    return any(
        name.lower() == b"content-type" and value.lower().startswith(b"text/event-stream") for name, value in headers
    )


# --- replica side ---------------------------------------------------------------------------------------------------


class _AppCall:
    """One request inside the app: what the app may receive, and a queue of what it has sent."""

    def __init__(
        self, app: ASGIApp, request: TunnelRequest, context: contextvars.Context | None, left: asyncio.Event
    ) -> None:
        self._request = request
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()
        self._client_gone = left
        self._body_taken = False
        self._closed = False
        self._ended = asyncio.Event()  # nothing more will be sent
        self.is_complete = False
        loop = asyncio.get_running_loop()
        run = app(request.scope(app), self._receive, self._send)
        self._task = loop.create_task(_awaited(run), context=context, name=f"asgi {request.path}")
        self._task.add_done_callback(self._end)

    def _end(self, _: asyncio.Task[None]) -> None:
        self._messages.put_nowait(None)
        self._ended.set()

    async def _receive(self) -> Message:
        if not self._body_taken:
            self._body_taken = True
            return {"type": "http.request", "body": self._request.body, "more_body": False}
        await self._client_gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        # Never waits and never raises: vLLM's generators must be suspended inside the engine only. One that is left at a
        # `yield` is closed by the garbage collector, which aborts nothing.
        if not self._closed:
            self._messages.put_nowait(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                self._ended.set()

    async def start(self) -> Start | None:
        """Status and headers, or None if the app ended without sending any."""
        message = await self._messages.get()
        if message is None or message["type"] != "http.response.start":
            return None
        return message["status"], [(bytes(name), bytes(value)) for name, value in message.get("headers", ())]

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Body chunks; what is already there when one is taken is joined to it. Sets `is_complete` at a proper end."""
        while not self.is_complete:
            message = await self._messages.get()
            parts: list[bytes] = []
            while message is not None:
                if message["type"] == "http.response.body":
                    parts.append(message.get("body", b""))
                    self.is_complete = not message.get("more_body", False)
                if self.is_complete or self._messages.empty():
                    break
                message = self._messages.get_nowait()
            joined = b"".join(parts)
            if joined:
                yield joined
            if message is None:
                return

    async def rest(self, gap_s: float) -> None:
        """Lets so many seconds pass, or less if the app has ended meanwhile."""
        if gap_s > 0 and not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(gap_s):
                    await self._ended.wait()

    def failure(self) -> BaseException | None:
        """The exception that ended the app's task, or None."""
        if not self._task.done() or self._task.cancelled():
            return None
        return self._task.exception()

    def close(self) -> None:
        """Tells the app that its client is gone, if it still runs; cancels it only if it does not heed that."""
        self._closed = True
        self._client_gone.set()
        if self._task.done():
            self.failure()  # retrieved, or asyncio would log it once more
        else:
            asyncio.get_running_loop().call_later(DISCONNECT_GRACE_S, self._task.cancel)


async def _awaited(run: Awaitable[None]) -> None:
    await run


async def run_app(
    app: ASGIApp,
    request: TunnelRequest,
    *,
    context: contextvars.Context | None = None,
    left: asyncio.Event | None = None,
    pacer: StreamPacer = UNPACED,
) -> AsyncGenerator[Start | bytes]:
    """Runs `app` for one request. Yields `(status, headers)` first, then body chunks.

    Errors (status 400 and above) are yielded in OpenAI's shape. An app that raises before it sent anything yields a 500.
    Afterwards an event stream ends in an error event; any other body raises `TruncatedReplyError`. Closing the generator
    tells the app that the client left; so does `left`, when the reply is nobody's any more. `context` is the context that the
    app's task runs in. `pacer` says how soon after each other chunks of an event stream may go.
    """
    left = left or asyncio.Event()
    call = _AppCall(app, request, context, left)
    try:
        start = await call.start()
        if start is None and left.is_set():
            return
        if start is None:
            log.error("app_failed_before_reply", path=request.path, cause=_told(call.failure()))
            yield 500, list(JSON_HEADERS)
            yield error_bytes(INTERNAL_ERROR)
            return
        status, headers = start
        if status >= 400:
            body = b"".join([chunk async for chunk in call.chunks()])
            yield status, [*_kept_headers(headers), *JSON_HEADERS]
            yield reshape_error(status, body, PROMPT_FIELDS.get(request.path))
            return
        yield status, headers
        is_stream = is_event_stream(headers)
        with pacer.stream() as sending:
            async for chunk in call.chunks():
                if is_stream and has_error_event(chunk):
                    yield reshape_events(chunk)
                    return  # vLLM goes on to `[DONE]`, as if the answer were complete
                yield chunk
                if is_stream:
                    await call.rest(sending.sent())
        if call.is_complete or left.is_set():
            return
        log.error("app_failed_within_reply", path=request.path, cause=_told(call.failure()))
        if not is_stream:
            raise TruncatedReplyError(f"{request.path}: the app ended within its reply")
        yield sse_error_event(INTERNAL_ERROR)
    finally:
        call.close()


def gone_start(status: int, replica_id: str) -> Start:
    """The start of an error from a replica whose engine is gone."""
    return status, [*JSON_HEADERS, (GONE_HEADER, replica_id.encode())]


async def marked_when_lost(
    reply: AsyncGenerator[Start | bytes], is_gone: Callable[[], bool], replica_id: str
) -> AsyncGenerator[Start | bytes]:
    """Passes a reply on; an error that comes after the engine died is marked, so that the Front asks another replica."""
    try:
        async for item in reply:
            is_lost = not isinstance(item, bytes) and item[0] >= 500 and is_gone()
            yield gone_start(LOST_STATUS, replica_id) if is_lost else item
    finally:
        await reply.aclose()


def _told(failure: BaseException | None) -> str:
    return "".join(traceback.format_exception(failure)) if failure is not None else "it ended early"


def _kept_headers(headers: list[Header]) -> list[Header]:
    return [(name, value) for name, value in headers if name.lower() not in (b"content-type", b"content-length")]


# --- front side -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    """What may be sent to the client at once. `rest` is None when `body` is all of it, else the stream that goes on."""

    status: int
    headers: list[Header]
    body: bytes
    rest: AsyncIterator[Start | bytes] | None


# What an app answers when its engine failed; 501 and 503 say that it will not or cannot now.
FAILURE_STATUSES = frozenset({500, 502, 504})


def has_failed(reply: Reply) -> bool:
    """Whether this reply, as far as it was read, is a failure of the engine behind it."""
    return reply.status in FAILURE_STATUSES or (is_event_stream(reply.headers) and has_failure_event(reply.body))


async def read_reply(stream: AsyncIterator[Start | bytes]) -> Reply:
    """Reads a tunnelled reply as far as its first byte may be sent.

    An event stream is held until its first chunk is there. Any other body is read whole, so that it cannot be cut after its
    headers were sent. Until this returns, nothing has reached the client and the request may be tried again elsewhere.

    Raises:
        TruncatedReplyError: the stream ended without a status.
    """
    start: Start | None = None
    parts: list[bytes] = []
    async for item in stream:
        if start is None:
            if isinstance(item, bytes):
                break
            start = (item[0], list(item[1]))
            continue
        if isinstance(item, bytes):
            parts.append(item)
            if is_event_stream(start[1]):
                return Reply(start[0], start[1], item, stream)
    if start is None:
        raise TruncatedReplyError("the replica ended its reply before it began")
    return Reply(start[0], start[1], b"".join(parts), None)
