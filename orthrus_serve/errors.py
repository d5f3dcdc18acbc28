"""The exception tree. Holds no HTTP server and no vLLM: an error knows its status, not how it is sent.

OrthrusError
├── ConfigError              a configuration that cannot be run; stops the start and names the key
├── UnsupportedVersionError  a vLLM or Ray other than the pinned one
├── AdapterError             an adapter that would not do what its name promises
├── ModelError               a model that could not be fetched, or failed its own check
└── RequestError             a request that is answered with an error in OpenAI's shape
"""

from typing import Any


class OrthrusError(Exception):
    """Root of every error that this project raises on purpose."""


class ConfigError(OrthrusError):
    """A configuration that cannot be run. The message names the key and the way out."""


class UnsupportedVersionError(OrthrusError):
    """A pinned package is there in another version. The message says what to install."""


class AdapterError(OrthrusError):
    """An adapter that cannot be served as declared (no module binds, rank too large, files missing)."""


class ModelError(OrthrusError):
    """A model that could not be built, or whose built files fail their check."""


class RequestError(OrthrusError):
    """A request refused with an HTTP status and a body in OpenAI's error shape.

    Attributes:
        status: HTTP status code.
        param: name of the offending field of the body, or None.
        code: machine-readable reason, as in OpenAI's `error.code`, or None.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The response body: `{"error": {"message", "type", "param", "code"}}`, as the OpenAI API sends it."""
        kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(self.status)
        if kind is None:
            kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
