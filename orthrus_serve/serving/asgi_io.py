"""One HTTP exchange at an ASGI connection: reading a body, whole and bounded, and sending an answer or an error at once.

Shared by the Front and by the middleware under plain `vllm serve`, so that both refuse the same bodies in the same words.
"""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from orthrus_serve.errors import RequestError
from orthrus_serve.serving.error_shape import JSON_HEADERS, error_bytes
from orthrus_serve.serving.tunnel import Header, Receive, Send


class ClientLeftError(Exception):
    """The client left before its request was complete."""


def header(headers: Iterable[Header], name: bytes) -> bytes | None:
    """The first value of a header; `name` in lower case."""
    return next((value for key, value in headers if key.lower() == name), None)


def with_length(headers: Iterable[Header], num_body_bytes: int) -> list[Header]:
    """The headers with the content length of another body."""
    kept = [(bytes(name), bytes(value)) for name, value in headers if bytes(name).lower() != b"content-length"]
    return [*kept, (b"content-length", str(num_body_bytes).encode())]


async def read_body(receive: Receive, headers: Iterable[Header], max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        RequestError: 413 above `max_bytes`, before the rest is read.
        ClientLeftError: the client left within its body.
    """
    too_large = RequestError(
        413, f"The request body is larger than {max_bytes} bytes (limits.max_body_bytes).", code="body_too_large"
    )
    declared = header(headers, b"content-length")
    if declared is not None and declared.isdigit() and int(declared[:20]) > max_bytes:
        raise too_large
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        if num_bytes > max_bytes:
            raise too_large
        if not message.get("more_body", False):
            return b"".join(parts)


async def send_whole(send: Send, status: int, headers: Iterable[Header], body: bytes) -> None:
    """An answer with its length."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_error(send: Send, error: RequestError, headers: Iterable[Header] = ()) -> None:
    """An error in OpenAI's shape."""
    await send_whole(send, error.status, [*JSON_HEADERS, *headers], error_bytes(error))


async def run_lifespan(receive: Receive, send: Send) -> None:
    """Answers a server that starts and stops the app."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def until_disconnect(receive: Receive) -> None:
    """Returns when the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def before_client_leaves(answer: Coroutine[Any, Any, None], receive: Receive) -> bool:
    """Runs `answer` to its end: True. Cancels it when the client disconnects first: False."""
    answering = asyncio.create_task(answer)
    leaving = asyncio.create_task(until_disconnect(receive))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            return False
        answering.result()
        return True
    finally:
        # Also when this task is cancelled, which is how Serve tells that the client is gone.
        leaving.cancel()
        answering.cancel()
