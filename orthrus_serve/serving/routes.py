"""Which requests the server answers: an explicit list of method and path. Pure.

Everything else that vLLM's app mounts (loading adapters, profiling, pausing, changing weights, sleeping) is unreachable.
"""

from enum import Enum

from orthrus_serve.errors import RequestError


class Target(Enum):
    """Who answers a route."""

    ENGINE = "engine"  # vLLM's app in a replica, through the tunnel
    HEALTH = "health"
    METRICS = "metrics"
    STATUS = "status"
    AB = "ab"
    VERSION = "version"


ROUTES: dict[str, tuple[str, Target]] = {
    "/v1/embeddings": ("POST", Target.ENGINE),
    "/v1/completions": ("POST", Target.ENGINE),
    "/v1/chat/completions": ("POST", Target.ENGINE),
    "/tokenize": ("POST", Target.ENGINE),
    "/detokenize": ("POST", Target.ENGINE),
    "/v1/models": ("GET", Target.ENGINE),
    "/version": ("GET", Target.VERSION),
    "/health": ("GET", Target.HEALTH),
    "/v1/health": ("GET", Target.HEALTH),
    "/metrics": ("GET", Target.METRICS),
    "/status": ("GET", Target.STATUS),
    "/ab": ("GET", Target.AB),
}

# Known from OpenAI or vLLM, not served here yet; named so that the answer says more than "unknown".
NOT_YET = {
    "/v1/responses": "Use /v1/chat/completions.",
    "/v1/score": "Compute scores from /v1/embeddings.",
    "/score": "Compute scores from /v1/embeddings.",
    "/rerank": "Compute scores from /v1/embeddings.",
    "/v1/rerank": "Compute scores from /v1/embeddings.",
    "/v2/rerank": "Compute scores from /v1/embeddings.",
}


class MethodNotAllowedError(RequestError):
    """A known path with another method. `allow` is the value of the `Allow` header."""

    def __init__(self, method: str, path: str, allow: str) -> None:
        super().__init__(405, f"{path} answers {allow}, not {method}.", code="method_not_allowed")
        self.allow = allow


def find_route(method: str, path: str) -> Target:
    """Who answers `method path`.

    Raises:
        MethodNotAllowedError: the path exists for another method.
        RequestError: 404 for any other path.
    """
    route = ROUTES.get(path)
    if route is None:
        hint = NOT_YET.get(path)
        message = f"{path} is not served yet. {hint}" if hint else f"Unknown request URL: {method} {path[:200]}."
        raise RequestError(404, message, code="unknown_url")
    if method != route[0]:
        raise MethodNotAllowedError(method, path, route[0])
    return route[1]
