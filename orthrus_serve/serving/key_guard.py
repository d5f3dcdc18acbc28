"""Lets in only who knows an API key: an ASGI app around the Front's, which sees a request before anything else does.

Guards: neither a key nor its digest is ever logged or answered; comparing takes as long for a wrong key as for a right one.
Pages that tell of the server and of no request (`/health`, `/metrics`, `/status`, …) stay open. Leaves out limits of a key
(`admission.py`).
"""

import hashlib
import hmac
from collections.abc import Callable, Iterable

from orthrus_serve.errors import RequestError
from orthrus_serve.serving.asgi_io import header, send_error
from orthrus_serve.serving.routes import ROUTES, Target
from orthrus_serve.serving.tunnel import ASGIApp, Header, Message, Receive, Send
from orthrus_serve.telemetry.catalog import BadKey

NO_KEY = RequestError(401, "An API key is needed: send it as `Authorization: Bearer …`.", code="missing_api_key")
WRONG_KEY = RequestError(401, "This API key is not known here.", code="invalid_api_key")


class KeyGuard:
    """Passes on what carries a known key, and everything to pages that are open."""

    def __init__(self, app: ASGIApp, digests: Iterable[str], refused: Callable[[BadKey], None]) -> None:
        """`digests` are SHA-256 in lower-case hex; `refused` is told of every 401."""
        self._app = app
        self._refused = refused
        self._digests = tuple(digest.encode() for digest in digests)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One ASGI connection."""
        if scope["type"] == "http" and not _is_open(scope["path"].removeprefix(scope.get("root_path", ""))):
            key = given_key(scope["headers"])
            if not self._is_known(key):
                self._refused("unknown" if key else "missing")
                await send_error(send, WRONG_KEY if key else NO_KEY, [(b"www-authenticate", b"Bearer")])
                return
        await self._app(scope, receive, send)

    def _is_known(self, key: bytes) -> bool:
        digest = hashlib.sha256(key).hexdigest().encode()
        # All of them, always: no early end tells how many there are or which one was near.
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        return bool(key) and any(found)


def given_key(headers: Iterable[Header]) -> bytes:
    """What a client put into `Authorization`, without `Bearer`; empty when it put nothing."""
    given = (header(headers, b"authorization") or b"").strip()
    return given[7:].strip() if given[:7].lower() in (b"bearer ", b"bearer") else given


def _is_open(path: str) -> bool:
    route = ROUTES.get(path)
    return route is not None and route[1] is not Target.ENGINE
