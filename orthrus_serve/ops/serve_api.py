"""Serve's own REST API, on Ray's dashboard: what is deployed now, and putting a changed configuration in its place.

Guards: every failure is one sentence that says what to do. Leaves out what is changed (`deployed_config.py`). Imports no Ray.
"""

import time
from collections.abc import Callable
from typing import Any

import httpx

from orthrus_serve.config.environment import ray_auth_token
from orthrus_serve.errors import OrthrusError

APPLICATIONS = "/api/serve/applications/"
TIMEOUT_S = 30.0
PAUSE_S = 1.0


class ServeApiError(OrthrusError):
    """Serve's API does not answer, or refused. The message says what to do."""


class ServeApi:
    """The applications of one Ray cluster, as its dashboard at `address` tells and changes them."""

    def __init__(self, address: str, read_token: Callable[[], str | None] = ray_auth_token) -> None:
        """`read_token` is asked only when Ray wants a token."""
        self._url = address.rstrip("/") + APPLICATIONS
        self._address = address
        self._read_token = read_token

    def details(self) -> dict[str, Any]:
        """Ray's `ServeInstanceDetails` as JSON.

        Raises:
            ServeApiError: nobody answers there, or not with what Serve would say.
        """
        try:
            details = self._ask("GET").json()
        except ValueError:
            details = None
        if not isinstance(details, dict) or not isinstance(details.get("applications"), dict):
            raise ServeApiError(f"{self._address} is not Ray's dashboard: it answers, but not as Serve's API does")
        return details

    def deploy(self, config: dict[str, Any]) -> None:
        """Puts `config` (Ray's `ServeDeploySchema`) in the place of everything that was deployed from files.

        Raises:
            ServeApiError: nobody answers there, or Serve refused.
        """
        self._ask("PUT", config)

    def wait(self, timeout_s: float) -> None:
        """Returns when Serve's API answers: what is deployed from then on is taken.

        Raises:
            ServeApiError: it did not in that time; why is said.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                self.details()
            except ServeApiError as error:
                if time.monotonic() > deadline_s:
                    raise ServeApiError(f"{error} (waited for {timeout_s:.0f} s)") from error
            else:
                return
            time.sleep(PAUSE_S)

    def _ask(self, method: str, body: dict[str, Any] | None = None) -> httpx.Response:
        answer = self._send(method, body, {})
        if answer.status_code in (401, 403):
            token = self._read_token()
            if token is None:
                raise ServeApiError(
                    f"Ray at {self._address} asks for a token: set RAY_AUTH_TOKEN, or put it into ~/.ray/auth_token"
                )
            answer = self._send(method, body, {"Authorization": f"Bearer {token}"})
        if answer.status_code in (401, 403):
            raise ServeApiError(
                f"Ray at {self._address} does not accept the token of RAY_AUTH_TOKEN or ~/.ray/auth_token"
            )
        if answer.status_code != 200:
            raise ServeApiError(f"Serve at {self._address} answered {answer.status_code}: {answer.text[:500]}")
        return answer

    def _send(self, method: str, body: dict[str, Any] | None, headers: dict[str, str]) -> httpx.Response:
        try:
            return httpx.request(method, self._url, json=body, headers=headers, timeout=TIMEOUT_S, trust_env=False)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServeApiError(
                f"Ray's dashboard does not answer at {self._address} ({type(error).__name__}); "
                "`--address` takes the one that Ray prints when it starts"
            ) from error
