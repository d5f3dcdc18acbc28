"""What a stranger can do to the real server: keys, what is logged, which ports are open, bodies and headers of any kind."""

import contextlib
import hashlib
import json
import socket
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ray import serve

from orthrus_serve.app import build
from tests.serve.conftest import TINY_VLLM, App, log_folder
from tests.serve.neighbour import Neighbour
from tests.serve.soak_faults import core_of
from tests.serve.test_fake_app import in_engine, until

EMBED, COMPLETE, CHAT = "/v1/embeddings", "/v1/completions", "/v1/chat/completions"
KEY = "sk-marker-4f1c0a77"
MARKER = "w77marker"  # no word of the tiny vocabulary, and of no test


@pytest.fixture(scope="module")
def locked(serve_url: str, tiny: Any) -> Iterator[App]:
    """A real server that asks for a key."""
    args = {
        "topology": "orthrus",
        "model": {"path": str(tiny.model)},
        "adapters": {"orthrus-embed": {"path": str(tiny.adapter)}},
        "num_gpus_per_replica": 0,
        "num_cpus_per_replica": 0.5,
        "api_keys": {"digests": [hashlib.sha256(KEY.encode()).hexdigest()]},
        "admission": {"each_key": {"requests_per_minute": 100_000}},
        "limits": {"max_body_bytes": 200_000, "max_inputs": 64},
        "vllm": TINY_VLLM,
    }
    serve.run(build(args), name="locked", route_prefix="/locked")
    yield App("locked", f"{serve_url}/locked")
    serve.delete("locked", _blocking=False)


@pytest.fixture(scope="module")
def http(locked: App) -> Iterator[httpx.Client]:
    """A client that has the key."""
    with httpx.Client(base_url=locked.url, timeout=60, headers={"authorization": f"Bearer {KEY}"}) as opened:
        yield opened


def test_without_a_known_key_only_pages_about_the_server_answer(locked: App, http: httpx.Client) -> None:
    body = {"input": "w3"}
    for headers in ({}, {"authorization": "Bearer sk-wrong"}, {"authorization": KEY[:-1]}):
        with httpx.Client(base_url=locked.url, headers=headers) as stranger:
            for answer in (stranger.post(EMBED, json=body), stranger.get("/v1/models"), stranger.get("/no/such/page")):
                assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
                assert answer.headers["www-authenticate"] == "Bearer"
            assert [stranger.get(path).status_code for path in ("/health", "/v1/health", "/metrics", "/status")] == [
                200
            ] * 4
    assert http.post(EMBED, json=body).status_code == 200
    assert http.get("/no/such/page").status_code == 404


def test_the_pages_that_are_open_tell_no_key_and_no_text(locked: App, http: httpx.Client) -> None:
    http.post(EMBED, json={"input": f"{MARKER} w3", "user": MARKER})
    pages = [httpx.get(f"{locked.url}{path}").text for path in ("/health", "/metrics", "/status", "/version")]
    secrets = (KEY, hashlib.sha256(KEY.encode()).hexdigest(), MARKER)
    assert not any(secret in page for page in pages for secret in secrets)


# One of every way in which a text can come in, and of every way in which it can be refused.
def marked(text: str) -> list[tuple[str, Any]]:
    say = [{"role": "user", "content": text}]
    return [
        (EMBED, {"input": text}), (EMBED, {"input": [text, ""]}), (EMBED, {"input": f"{text} " * 600}),
        (EMBED, {"input": text, "dimensions": 7}), (EMBED, {"input": text, "model": text}),
        (EMBED, {"input": {"text": text}}), (EMBED, {"input": text, "user": text, "encoding_format": text}),
        (COMPLETE, {"prompt": text, "max_tokens": 2}), (COMPLETE, {"prompt": text, "max_tokens": 2, "stream": True}),
        (COMPLETE, {"prompt": text, "max_tokens": 0}), (COMPLETE, {"prompt": f"{text} " * 600}),
        (COMPLETE, {"prompt": text, "stop": text, "max_tokens": 2, "suffix": text}),
        (CHAT, {"messages": say, "max_tokens": 2}), (CHAT, {"messages": say, "max_tokens": 2, "stream": True}),
        (CHAT, {"messages": [{"role": text, "content": text}]}), (CHAT, {"messages": say, "chat_template": text}),
        (CHAT, {"messages": say, "tools": text}), (CHAT, {"messages": say, "response_format": {"type": text}}),
        (CHAT, {"messages": say, "structured_outputs": {"regex": f"({text}"}}), (CHAT, {"messages": say, text: text}),
        (CHAT, {"messages": say, "chat_template_kwargs": {"a": text}, "max_tokens": 2}),
        ("/tokenize", {"prompt": text}), ("/tokenize", {"messages": say, "prompt": 5}), (f"/{text}", {}),
    ]  # fmt: skip


def test_neither_text_nor_key_is_in_any_log(locked: App, http: httpx.Client) -> None:
    for path, body in marked(MARKER):
        assert http.post(path, json=body).status_code < 500, (path, body)
        http.post(path, content=json.dumps(body).encode()[:-3] + MARKER.encode())
    http.post(EMBED, json={"input": "w3"}, headers={"authorization": f"Bearer {KEY}x"})
    http.post(EMBED, json={"input": "w3"}, headers={"x-priority": KEY})
    found = {
        (path.name, line[:300])
        for path in log_folder().rglob("*")
        if path.is_file()
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
        # The address line of a page that does not exist is the only place: it was no text of a request.
        if KEY in line or (MARKER in line and f"/{MARKER}" not in line)
    }
    assert found == set()


# --- ports ----------------------------------------------------------------------------------------------------------


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    """Addresses and ports on which a process takes TCP connections."""
    rows = process.net_connections(kind="tcp")
    return {(row.laddr.ip, row.laddr.port) for row in rows if row.status == psutil.CONN_LISTEN}


def test_http_listens_where_the_file_says_and_engines_open_nothing_to_the_network(locked: App) -> None:
    url, loopback = httpx.URL(locked.url), {"127.0.0.1", "::1"}
    everywhere: list[str] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            everywhere += [ip for ip, port in listening(process) if port == url.port]
    assert everywhere == ["127.0.0.1"]
    (info,) = locked.info("Engine")
    assert {ip for ip, _ in listening(core_of(info["pid"]))} <= loopback


# --- anything at all ------------------------------------------------------------------------------------------------

FIELDS = [
    "model", "input", "prompt", "messages", "tokens", "n", "max_tokens", "max_completion_tokens", "min_tokens", "temperature",
    "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "logit_bias", "logprobs", "top_logprobs", "prompt_logprobs",
    "stream", "stream_options", "echo", "dimensions", "encoding_format", "embed_dtype", "endianness", "truncate_prompt_tokens",
    "truncation_side", "tools", "tool_choice", "response_format", "structured_outputs", "bad_words", "allowed_token_ids",
    "user", "priority", "request_id", "add_special_tokens", "use_activation", "cache_salt", "ignore_eos",
    "repetition_penalty", "presence_penalty", "chat_template_kwargs", "documents", "logprob_token_ids",
    "thinking_token_budget", "return_token_ids", "skip_special_tokens", "stream_interval", "reasoning_effort", "padding",
]  # fmt: skip
NUMBERS = st.one_of(
    st.sampled_from([0, -1, 1, 2, 511, 512, 513, 2**31, 2**63, 10**30, 0.5, -0.5, 1e308]), st.integers(0, 600)
)
TEXTS = st.one_of(
    st.sampled_from(
        ["", " ", "w3", "w3 w4", "\x00", "</s>", "auto", "required", "json_object", "left", "base64", "\ud800"]
    ),
    st.text(max_size=20),
)
INNER_FIELDS = ["type", "role", "content", "schema", "name", "json_schema", "regex", "5"]
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(INNER_FIELDS), inner, max_size=3),
    ),
    max_leaves=8,
)  # fmt: skip
BASES: dict[str, dict[str, Any]] = {
    EMBED: {"input": "w3 w4"},
    COMPLETE: {"prompt": "w3 w4", "max_tokens": 3},
    CHAT: {"messages": [{"role": "user", "content": "w3"}], "max_tokens": 3},
    "/tokenize": {"prompt": "w3"},
    "/detokenize": {"tokens": [3]},
}
SLOW = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def check(answer: httpx.Response) -> None:
    """200, or a refusal in OpenAI's shape; nothing of ours failed."""
    assert answer.status_code in (200, 400, 401, 404, 405, 413, 422, 431), answer.text[:500]
    if answer.headers["content-type"].startswith("text/event-stream"):
        assert "internal" not in answer.text.lower(), answer.text[:500]
    elif answer.status_code not in (200, 431):
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@SLOW
@given(st.sampled_from(sorted(BASES)), st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=3))
def test_no_body_makes_the_server_fail(http: httpx.Client, neighbour: Neighbour, path: str, fields: Any) -> None:
    body = json.dumps({**BASES[path], **fields}).encode()
    check(http.post(path, content=body, headers={"content-type": "application/json"}))
    assert neighbour.wrong == []


TOKEN = st.text(string.ascii_letters + string.digits + "-", min_size=1, max_size=12)
NAMES = st.one_of(
    st.sampled_from([
        "x-request-id", "x-slo-ttft-ms", "x-slo-e2e-ms", "x-priority", "x-data-parallel-rank", "traceparent", "tracestate",
        "content-type", "accept", "accept-encoding", "expect", "range", "cookie", "x-forwarded-for",
        "serve_multiplexed_model_id", "x-session-id", "te", "content-encoding", "x-orthrus-replica-gone",
    ]),
    TOKEN,
)  # fmt: skip
HEADER_VALUES = st.one_of(
    st.sampled_from(["", "0", "-1", "nan", "1e999", "high", "application/json", "text/plain", "gzip", "x" * 9000]),
    st.text(string.ascii_letters + string.digits + string.punctuation + " ", max_size=40),
)


@SLOW
@given(st.sampled_from(sorted(BASES)), st.dictionaries(NAMES, HEADER_VALUES, max_size=4))
def test_no_header_makes_the_server_fail(http: httpx.Client, neighbour: Neighbour, path: str, headers: Any) -> None:
    clean = {name: value.strip() for name, value in headers.items() if name.lower() not in ("host", "content-length")}
    check(
        http.post(path, content=json.dumps(BASES[path]).encode(), headers={"content-type": "application/json", **clean})
    )
    assert neighbour.wrong == []


RAW = [
    b"", b"\r\n\r\n", b"GET\r\n\r\n",
    b"POST /locked/v1/embeddings HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"\x00" * 1000,
    b"POST /locked/v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{",
    b"POST /locked/v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
    b"POST /locked/v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n{}",
    b"POST /locked/v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /locked/v1/embeddings HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nZZZ\r\n",
    b"POST /locked/v1/embeddings HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{\"in",
    b"GET /locked/" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /locked/health HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 100_000 + b"\r\n\r\n",
    b"GET /locked/%2e%2e/health HTTP/1.1\r\nhost: x\r\n\r\n", b"GET http://other/ HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /locked/v1/models HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
]  # fmt: skip


@pytest.mark.parametrize("raw", RAW, ids=range(len(RAW)))
def test_bytes_that_are_no_request_or_only_a_part_of_one_end_nothing(
    locked: App, http: httpx.Client, neighbour: Neighbour, raw: bytes
) -> None:
    url = httpx.URL(locked.url)
    with socket.create_connection((url.host, url.port), timeout=10) as connection:
        connection.sendall(raw)
        connection.settimeout(0.5)
        try:
            answer = connection.recv(65536)
        except TimeoutError:
            answer = b""  # it waits for the rest
    status = answer.split(b" ")[1] if answer.startswith(b"HTTP/") else b"400"
    assert (not status.startswith(b"5") and status != b"200") or b"/health" in raw, answer[:300]
    assert http.post(EMBED, json={"input": "w3"}).status_code == 200
    assert neighbour.wrong == []


def test_a_body_above_the_limit_is_refused_whether_its_length_is_told_or_not(http: httpx.Client) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(400):
            yield b" " * 1000

    for content in (b" " * 400_000, pieces()):
        answer = http.post(EMBED, content=content)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_streams_that_are_left_at_any_moment_leave_nothing_in_the_engine(locked: App, http: httpx.Client) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "stream": True}
    for num_lines in range(12):
        with http.stream("POST", COMPLETE, json=body) as answer:
            for _ in zip(range(num_lines), answer.iter_lines(), strict=False):
                pass
    until(lambda: in_engine(locked) == 0)
    until(lambda: [(front["open"], front["tokens"]) for front in locked.info("Front")] == [(0, 0)])


def test_the_log_folder_is_the_one_that_is_searched(locked: App) -> None:
    assert any("locked" in path.name for path in Path(log_folder()).rglob("*"))
