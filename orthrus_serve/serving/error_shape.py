"""Puts every error into OpenAI's shape: bodies of vLLM's app that differ, and errors inside a stream. Pure.

Leaves out which status an error has: whoever raised it has decided that.
"""

import json
from typing import Any

from orthrus_serve.errors import RequestError

JSON_HEADERS = ((b"content-type", b"application/json"),)


def error_bytes(error: RequestError) -> bytes:
    """The JSON body of an error response."""
    return json.dumps(error.body(), separators=(",", ":")).encode()


def sse_error_event(error: RequestError) -> bytes:
    """A server-sent event that tells a client that its stream was cut.

    The event is named `error`, and its data has the shape of an error body, which the OpenAI clients raise from. No `[DONE]`
    follows it.
    """
    return b"event: error\ndata: " + error_bytes(error) + b"\n\n"


def reshape_error(status: int, body: bytes) -> bytes:
    """An error body of vLLM's app (or of the web framework under it) in the shape that this server promises.

    vLLM puts the HTTP status into `error.code` and class names into `error.type`; FastAPI answers `{"detail": …}`; either may
    be plain text. The message and the named field are kept.
    """
    message, param = _read_error(body)
    return error_bytes(RequestError(status, message or f"The request failed with status {status}.", param=param))


def _read_error(body: bytes) -> tuple[str, str | None]:
    text = body.decode("utf-8", errors="replace").strip()
    try:
        parsed: Any = json.loads(text)
    except (ValueError, RecursionError):
        return text[:2000], None
    if not isinstance(parsed, dict):
        return text[:2000], None
    error = parsed.get("error", parsed)
    if isinstance(error, str):
        return error, None
    if not isinstance(error, dict):
        return text[:2000], None
    message = error.get("message") or error.get("detail") or text[:2000]
    param = error.get("param")
    return message if isinstance(message, str) else json.dumps(message), param if isinstance(param, str) else None
