"""Serve's REST API as the commands use it: every failure is a sentence, and a token is sent only where one is asked for."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typing_extensions import override

from orthrus_serve.config.environment import ray_auth_token
from orthrus_serve.ops.serve_api import ServeApi, ServeApiError
from orthrus_serve.ops.switch import SwitchError, status_page


class Dashboard:
    """An HTTP server that answers what a test tells it to, and remembers what it was asked."""

    def __init__(self) -> None:
        self.token: str | None = None
        self.status, self.text = 200, json.dumps({"applications": {}})
        self.asked: list[tuple[str, str | None, bytes]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer()

            def do_PUT(self) -> None:
                self._answer()

            def _answer(self) -> None:
                given = self.headers.get("Authorization")
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                outer.asked.append((f"{self.command} {self.path}", given, body))
                allowed = outer.token is None or given == f"Bearer {outer.token}"
                self.send_response(outer.status if allowed else (403 if given else 401))
                self.end_headers()
                self.wfile.write(outer.text.encode())

            @override
            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def dashboard() -> Iterator[Dashboard]:
    made = Dashboard()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def no_token() -> str | None:
    return None


def test_details_are_read_and_a_configuration_is_put_without_a_token_where_none_is_asked_for(dashboard):
    api = ServeApi(dashboard.url + "/", read_token=lambda: "secret")
    assert api.details() == {"applications": {}}
    api.deploy({"applications": [1]})
    path = "/api/serve/applications/"
    assert [asked[:2] for asked in dashboard.asked] == [(f"GET {path}", None), (f"PUT {path}", None)]
    assert json.loads(dashboard.asked[1][2]) == {"applications": [1]}


def test_a_token_is_sent_where_one_is_asked_for(dashboard):
    dashboard.token = "secret"
    ServeApi(dashboard.url, read_token=lambda: "secret").details()
    assert [asked[1] for asked in dashboard.asked] == [None, "Bearer secret"]


@pytest.mark.parametrize(
    ("token", "status", "text", "reason"),
    [
        (no_token, 200, "", "asks for a token"),
        (lambda: "other", 200, "", "does not accept the token"),
        (lambda: "secret", 400, "no such thing", "answered 400: no such thing"),
        (lambda: "secret", 200, "<html>", "is not Ray's dashboard"),
        (lambda: "secret", 200, "[]", "is not Ray's dashboard"),
        (lambda: "secret", 200, "{}", "is not Ray's dashboard"),
    ],
)
def test_a_refusal_is_a_sentence(dashboard, token, status, text, reason):
    dashboard.token, dashboard.status, dashboard.text = "secret", status, text
    with pytest.raises(ServeApiError, match=reason):
        ServeApi(dashboard.url, read_token=token).details()


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "127.0.0.1:8265", "http://[", "ray://x:1", ""])
def test_an_address_where_nobody_answers_is_named(address):
    with pytest.raises(ServeApiError, match="dashboard does not answer"):
        ServeApi(address, read_token=no_token).details()


@pytest.mark.parametrize("text", ["<html>", "[]", "{}"])
def test_a_status_page_of_somebody_else_is_refused(dashboard, text):
    dashboard.text = text
    with pytest.raises(SwitchError, match="/status"):
        status_page(dashboard.url)
    dashboard.status = 404
    with pytest.raises(SwitchError, match="does not answer"):
        status_page(dashboard.url)


def test_the_token_is_where_rays_own_commands_look(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    assert ray_auth_token() is None
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("at home\n")
    assert ray_auth_token() == "at home"
    (tmp_path / "elsewhere").write_text("elsewhere")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "elsewhere"))
    assert ray_auth_token() == "elsewhere"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "given")
    assert ray_auth_token() == "given"


def test_waiting_ends_when_the_api_answers_and_says_why_when_it_does_not(dashboard: Dashboard) -> None:
    dashboard.status = 503
    threading.Timer(0.3, lambda: setattr(dashboard, "status", 200)).start()
    ServeApi(dashboard.url).wait(timeout_s=60)
    assert len(dashboard.asked) > 1
    dashboard.status = 503
    with pytest.raises(ServeApiError, match=r"503.*waited for 0 s"):
        ServeApi(dashboard.url).wait(timeout_s=0)
