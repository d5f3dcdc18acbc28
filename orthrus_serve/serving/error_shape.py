"""Puts every error into OpenAI's shape: bodies of vLLM's app that differ, and errors inside a stream. Pure.

Leaves out which status an error has: whoever raised it has decided that.
"""

import json
import re
from typing import Any

from orthrus_serve.errors import RequestError

# What vLLM's messages look like. Whatever matches none of these passes as it is.
_VALIDATION_ERROR = re.compile(
    r"'loc': '(?P<field>[^']*)', 'msg': (?P<quote>['\"])(?P<complaint>.*?)(?P=quote), 'input'"
)
_PARAMETER_NOTE = re.compile(r" \(parameter=[^()]*\)$")
# A body with a smaller limit was refused before vLLM saw it: so vLLM found no room behind the prompt.
_NO_ROOM = "max_tokens must be at least 1"
_TOO_LONG = re.compile(r"This model's maximum context length|The prompt fills the model|input: \d+ tokens")
_EMPTY = re.compile(r"prompt cannot be empty|^input: ")

_ERROR_EVENT = b'data: {"error":'
_OUR_ERROR_EVENT = b"event: error\ndata: "
# As `error_bytes` writes it: within a message the quotes would be escaped.
_CALLERS = (b'"type":"invalid_request_error"', b'"type":"not_found_error"')

JSON_HEADERS = ((b"content-type", b"application/json"),)


def error_bytes(error: RequestError) -> bytes:
    """The JSON body of an error response."""
    return json.dumps(error.body(), separators=(",", ":")).encode()


def sse_error_event(error: RequestError) -> bytes:
    """A server-sent event that tells a client that its stream was cut.

    The event is named `error`, and its data has the shape of an error body, which the OpenAI clients raise from. No `[DONE]`
    follows it.
    """
    return _OUR_ERROR_EVENT + error_bytes(error) + b"\n\n"


def reshape_error(status: int, body: bytes, prompt_field: str | None = None) -> bytes:
    """An error body of vLLM's app (or of the web framework under it) in the shape that this server promises.

    vLLM puts the HTTP status into `error.code` and class names into `error.type`; FastAPI answers `{"detail": …}`; either may
    be plain text. The message is kept, in shorter words where it is a dump of validation errors.

    Args:
        prompt_field: the field of this route that holds the text: named by errors about its length.
    """
    message, param = _read_error(body)
    first = _VALIDATION_ERROR.search(message)
    if first is not None:
        param = first["field"].removeprefix("body.")
        message = f"{param}: {first['complaint']}."
    message = _PARAMETER_NOTE.sub("", message) or f"The request failed with status {status}."
    code = None
    if message.startswith(_NO_ROOM):
        message = "The prompt fills the model's whole context, which leaves no room for an answer. Please shorten it."
    if _TOO_LONG.match(message):
        param, code = prompt_field, "context_length_exceeded"
    elif _EMPTY.search(message):
        param = prompt_field
    return error_bytes(RequestError(status, message, param=param, code=code))


def has_error_event(chunk: bytes) -> bool:
    """Whether an event of this chunk is an error of vLLM's. Text in an event cannot look like one: its quotes are escaped."""
    return _ERROR_EVENT in chunk


def has_our_error_event(chunk: bytes) -> bool:
    """Whether this chunk has an error event in our shape. Text in an event cannot look like one: its newlines are escaped."""
    return _OUR_ERROR_EVENT in chunk


def has_failure_event(chunk: bytes) -> bool:
    """Whether this chunk has an error event in our shape that tells of the server, not of what its caller asked for."""
    _, event, data = chunk.partition(_OUR_ERROR_EVENT)
    return bool(event) and not any(kind in data for kind in _CALLERS)


def reshape_events(chunk: bytes) -> bytes:
    """A chunk of whole server-sent events up to its first error, and that in our shape."""
    before, _, after = chunk.partition(_ERROR_EVENT)
    body = b'{"error":' + after.partition(b"\n\n")[0]
    return before + _OUR_ERROR_EVENT + reshape_error(_status_of(body), body) + b"\n\n"


def _status_of(body: bytes) -> int:
    """The status that vLLM would have answered had the stream not begun: where it is the caller's error, the event says so."""
    try:
        code: Any = json.loads(body)["error"]["code"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return 500
    return code if isinstance(code, int) and 400 <= code < 500 else 500


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
