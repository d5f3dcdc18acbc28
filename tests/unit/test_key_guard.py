"""Who is let in by an API key, and what is told to those who are not."""

import hashlib
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from orthrus_serve.config.api_keys import read_digests
from orthrus_serve.config.clients import ApiKeysSpec
from orthrus_serve.config.load import parse_args
from orthrus_serve.errors import ConfigError
from orthrus_serve.serving.key_guard import KeyGuard
from orthrus_serve.serving.routes import NOT_YET, ROUTES, Target
from orthrus_serve.telemetry.catalog import BadKey

KEY, OTHER = b"sk-0123456789", b"sk-abcdefghij"
DIGESTS = [hashlib.sha256(key).hexdigest() for key in (KEY, OTHER)]
OPEN = [path for path, (_, target) in ROUTES.items() if target is not Target.ENGINE]
CLOSED = [*(path for path in ROUTES if path not in OPEN), *NOT_YET, "/", "/v1/load_lora_adapter", "/docs", "/metrics/"]


async def ask(
    path: str, *headers: tuple[bytes, bytes], root_path: str = "", refused: Callable[[BadKey], None] = lambda _: None
) -> tuple[int, dict[bytes, bytes], bytes]:
    """Status 200 stands for having reached the app, which must never read the body of the others."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def receive() -> Any:
        raise AssertionError("nothing is read before the key is known")

    async def send(message: Any) -> None:
        seen.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": root_path + path,
        "root_path": root_path,
        "headers": list(headers),
    }
    await KeyGuard(app, DIGESTS, refused)(scope, receive, send)
    return seen[0]["status"], dict(seen[0]["headers"]), seen[1]["body"]


@pytest.mark.parametrize("given", [b"Bearer " + KEY, b"bearer " + OTHER, b"Bearer  " + KEY + b" ", KEY])
@pytest.mark.parametrize("path", CLOSED)
async def test_who_knows_a_key_passes(path: str, given: bytes) -> None:
    assert (await ask(path, (b"authorization", given)))[0] == 200


WRONG = [
    b"", b"Bearer", b"Bearer ", b"Bearer x", b"Basic " + KEY, b"Bearer " + KEY[:-1], b"Bearer " + KEY + b"0", KEY.upper(),
    DIGESTS[0].encode(), b"Bearer " + DIGESTS[0].encode(), b"\xff\xfe", b"Bearer " + b"x" * 60_000,
]  # fmt: skip


@pytest.mark.parametrize("given", WRONG)
@pytest.mark.parametrize("path", ["/v1/embeddings", "/", "/v1/load_lora_adapter"])
async def test_everybody_else_gets_a_401_in_openai_shape_before_anything_is_read(path: str, given: bytes) -> None:
    status, headers, body = await ask(path, (b"authorization", given), root_path="/app")
    error = json.loads(body)["error"]
    assert status == 401
    assert headers[b"www-authenticate"] == b"Bearer"
    assert (error["type"], error["param"]) == ("authentication_error", None)
    assert error["code"] in ("missing_api_key", "invalid_api_key")
    assert KEY not in body


async def test_every_401_is_counted_by_what_was_wrong_and_nothing_else_is() -> None:
    counted: list[BadKey] = []
    await ask("/v1/models", refused=counted.append)
    await ask("/v1/embeddings", (b"authorization", b"Bearer "), refused=counted.append)
    await ask("/no/such/page", (b"authorization", b"Bearer sk-wrong"), refused=counted.append)
    await ask("/health", refused=counted.append)
    await ask("/v1/embeddings", (b"authorization", b"Bearer " + KEY), refused=counted.append)
    assert counted == ["missing", "missing", "unknown"]


@pytest.mark.parametrize("path", OPEN)
async def test_pages_about_the_server_are_open(path: str) -> None:
    assert (await ask(path))[0] == 200
    assert (await ask(path, root_path="/app"))[0] == 200


async def test_neither_a_key_nor_its_digest_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        await ask("/v1/embeddings", (b"authorization", b"Bearer " + KEY))
        await ask("/v1/embeddings", (b"authorization", b"Bearer sk-wrong"))
    assert not any(word in caplog.text for word in (KEY.decode(), "sk-wrong", *DIGESTS))


# --- configuration --------------------------------------------------------------------------------------------------


def test_digests_come_from_the_settings_and_from_a_file_as_sha256sum_prints_them(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# team a\n{DIGESTS[0]}  -\n\n   {DIGESTS[1]} since May\n")
    assert read_digests(ApiKeysSpec(file=str(file))) == set(DIGESTS)
    assert read_digests(ApiKeysSpec(digests=(DIGESTS[0],))) == {DIGESTS[0]}


def test_a_key_in_place_of_its_digest_is_refused_and_not_repeated(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{DIGESTS[0]}\n{KEY.decode()}\n")
    with pytest.raises(ConfigError, match="line 2") as caught:
        read_digests(ApiKeysSpec(file=str(file)))
    assert KEY.decode() not in str(caught.value)


@pytest.mark.parametrize(
    ("api_keys", "expected"),
    [
        ({}, "api_keys.digests: name at least one key"),
        ({"digests": ["sk-plain"]}, "api_keys.digests: a key is named by its SHA-256"),
        ({"keys": []}, "api_keys.keys: unknown key"),
    ],
)
def test_settings_that_let_nobody_in_or_hold_a_key_are_refused(api_keys: Any, expected: str) -> None:
    raw = {"topology": "orthrus", "model": {"path": "/m"}, "adapters": {"e": {"path": "/a"}}, "api_keys": api_keys}
    with pytest.raises(ConfigError, match=expected) as caught:
        parse_args(raw)
    assert "sk-plain" not in str(caught.value)


def test_a_file_without_a_key_or_that_is_not_there_is_refused(tmp_path: Any) -> None:
    (tmp_path / "empty").write_text("# none yet\n")
    for name, expected in (("empty", "nobody could ask"), ("missing", "cannot be read")):
        with pytest.raises(ConfigError, match=expected):
            read_digests(ApiKeysSpec(file=str(tmp_path / name)))
