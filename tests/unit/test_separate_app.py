"""One app over two: who is asked by path and by name, the list of models of both, and errors passed on as they are."""

import json
from typing import Any

import httpx
import pytest

from orthrus_serve.engine.separate_app import SeparateApp


def app_of(name: str, status: int = 200) -> Any:
    """An ASGI app that answers with its name, what it was sent, and a list of one model."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        data = {"app": name, "sent": body.decode(errors="replace"), "data": [{"id": name}]}
        await send({"type": "http.response.start", "status": status, "headers": [(b"x-app", name.encode())]})
        await send({"type": "http.response.body", "body": json.dumps(data).encode(), "more_body": False})

    return app


async def ask(method: str, path: str, content: Any = b"", *, status: int = 200) -> httpx.Response:
    both = SeparateApp(app_of("orthrus"), app_of("orthrus-embed", status), "orthrus-embed")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(both), base_url="http://x") as client:  # pyright: ignore
        return await client.request(method, path, content=content)


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/embeddings", {"model": "orthrus-embed"}, "orthrus-embed"),
        ("/v1/completions", {"model": "orthrus"}, "orthrus"),
        ("/v1/chat/completions", {}, "orthrus"),
        ("/tokenize", {"model": "orthrus-embed"}, "orthrus-embed"),
        ("/tokenize", {"model": "orthrus"}, "orthrus"),
        ("/detokenize", {}, "orthrus"),
        ("/detokenize", {"model": ["orthrus-embed"]}, "orthrus"),
    ],
)
async def test_a_request_reaches_the_engine_that_it_is_for_with_its_body(path, body, expected):
    sent = json.dumps(body)
    answer = (await ask("POST", path, sent)).json()
    assert (answer["app"], answer["sent"]) == (expected, sent)


@pytest.mark.parametrize("sent", [b"", b"{", b"[1]", b"\xff"])
async def test_a_body_that_names_nobody_goes_to_the_generator(sent):
    assert (await ask("POST", "/tokenize", sent)).json()["app"] == "orthrus"


async def test_a_body_in_pieces_is_put_together():
    async def pieces() -> Any:
        yield b'{"model": "orthr'
        yield b'us-embed"}'

    assert (await ask("POST", "/tokenize", pieces())).json()["sent"] == '{"model": "orthrus-embed"}'


async def test_models_of_both_are_listed_and_an_error_is_passed_on():
    listed = await ask("GET", "/v1/models")
    assert (listed.json()["object"], [model["id"] for model in listed.json()["data"]]) == (
        "list",
        ["orthrus", "orthrus-embed"],
    )
    failed = await ask("GET", "/v1/models", status=500)
    assert (failed.status_code, failed.headers["x-app"]) == (500, "orthrus-embed")
