"""One ASGI app over two engines: embeddings go to one, everything else to the other, and `/v1/models` lists both.

Which tokenizer is meant is in the body (`model`), so for `/tokenize` and `/detokenize` that is read first. Leaves out which
routes may be reached (the Front's allow-list) and what is in the bodies otherwise (`serving/request_check.py`).
"""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Message, Receive, Send], Awaitable[None]]

EMBEDDINGS, MODELS = "/v1/embeddings", "/v1/models"
TOKENS = frozenset({"/tokenize", "/detokenize"})


class SeparateApp:
    """The app of a replica with two engines.

    Args:
        generator, embedder: vLLM's own apps.
        embedder_name: the name that embeds, as clients write it.
    """

    def __init__(self, generator: ASGIApp, embedder: ASGIApp, embedder_name: str) -> None:
        self._generator = generator
        self._embedder = embedder
        self._embedder_name = embedder_name

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        path = scope.get("path")
        if path == EMBEDDINGS:
            await self._embedder(scope, receive, send)
        elif path == MODELS:
            await self._both_models(scope, receive, send)
        elif path in TOKENS:
            body = await _whole_body(receive)
            app = self._embedder if _model_of(body) == self._embedder_name else self._generator
            await app(scope, _replayed(body, receive), send)
        else:
            await self._generator(scope, receive, send)

    async def _both_models(self, scope: Message, receive: Receive, send: Send) -> None:
        """The generator's list with the embedder's behind it; an error of either is passed on as it is."""
        listed: list[list[Any]] = []
        for app in (self._generator, self._embedder):
            reply = _Reply()
            await app(dict(scope), _replayed(b"", receive), reply.send)  # a GET has no body, and both may look for it
            if reply.start["status"] != 200:
                await _send_whole(send, reply.start, bytes(reply.body))
                return
            listed.append(json.loads(reply.body)["data"])
        body = json.dumps({"object": "list", "data": [*listed[0], *listed[1]]}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await _send_whole(send, {"type": "http.response.start", "status": 200, "headers": headers}, body)


class _Reply:
    """A reply that is kept rather than sent."""

    def __init__(self) -> None:
        self.start: Message = {"type": "http.response.start", "status": 500, "headers": []}
        self.body = bytearray()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.start = message
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")


async def _send_whole(send: Send, start: Message, body: bytes) -> None:
    await send(start)
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _whole_body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if message["type"] != "http.request" or not message.get("more_body", False):
            return bytes(body)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body again, then whatever comes."""
    is_given = False

    async def again() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _model_of(body: bytes) -> Any:
    try:
        fields = json.loads(body)
    except ValueError:
        return None
    return fields.get("model") if isinstance(fields, dict) else None
