"""Faults from outside, on a real local Ray with fake engines: a killed Front, slow clients, half-closed connections."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from ray import serve

from orthrus_serve.app import compose
from orthrus_serve.config.schema import AppArgs
from tests.serve.conftest import FAKE_ARGS, App
from tests.serve.fakes import start_fake
from tests.serve.soak_faults import front_pids
from tests.serve.test_fake_app import until

EMBED, COMPLETE = "/v1/embeddings", "/v1/completions"


@pytest.fixture(scope="module")
def app(serve_url: str) -> Iterator[App]:
    """Two Fronts before two fake engines."""
    args = AppArgs.model_validate({**FAKE_ARGS, "front": {"num_replicas": 2, "num_cpus": 0.1}})
    serve.run(compose(args, start_fake), name="faults", route_prefix="/faults")
    yield App("faults", f"{serve_url}/faults")
    serve.delete("faults", _blocking=False)


@pytest.fixture(autouse=True)
def _settled(app: App) -> Iterator[None]:
    """Afterwards everybody is there and nothing is charged, open or running."""
    until(lambda: is_at_rest(app), limit_s=60)
    yield
    until(lambda: is_at_rest(app), limit_s=60)


def is_at_rest(app: App) -> bool:
    fronts = [(front["open"], front["tokens"], front["loads"]) for front in app.info("Front")]
    engines = [(engine["open"], engine["in_engine"]) for engine in app.info("Engine")]
    return fronts == [(0, 0, {})] * 2 and engines == [(0, 0)] * 2


async def ask(client: httpx.AsyncClient, number: int) -> str:
    """One request, whole or streamed, and how it ended."""
    body = {"model": "orthrus", "prompt": "x", "max_tokens": 20, "stream": bool(number % 2), "fake": {"gap_s": 0.02}}
    try:
        answer = await client.post(COMPLETE, json=body)
    except httpx.TimeoutException:
        return "nothing came"
    except httpx.TransportError:
        return "connection closed"
    if answer.status_code != 200:
        return f"status {answer.status_code}"
    if "event: error" in answer.text:
        return "cut with an error event"
    is_whole = answer.text.rstrip().endswith("[DONE]") if number % 2 else len(answer.json()["choices"][0]["text"]) > 20
    return "right" if is_whole else "cut without a word"


def test_a_front_that_is_killed_under_load_costs_only_what_it_was_relaying_and_comes_back(app: App) -> None:
    """Serve's proxy ends what the lost Front relayed: by a 500 before the first byte, by a closed connection after it."""
    victim = front_pids(app)[0]
    ends = Counter[str]()

    def is_replaced(pid: int) -> bool:
        return len(app.info("Front")) == 2 and pid not in front_pids(app)

    async def client_of(number: int, http: httpx.AsyncClient, stop: asyncio.Event) -> None:
        while not stop.is_set():
            ends[await ask(http, number)] += 1

    async def load() -> None:
        stop = asyncio.Event()
        async with httpx.AsyncClient(base_url=app.url, timeout=30, limits=httpx.Limits(max_connections=50)) as http:
            clients = [asyncio.create_task(client_of(number, http, stop)) for number in range(16)]
            await asyncio.to_thread(until, lambda: ends["right"] >= 32, 60)
            assert set(ends) == {"right"}
            os.kill(victim, signal.SIGKILL)
            await asyncio.to_thread(until, lambda: is_replaced(victim), 60)
            enough = ends["right"] + 32
            await asyncio.to_thread(until, lambda: ends["right"] >= enough, 60)
            stop.set()
            await asyncio.gather(*clients)

    asyncio.run(load())
    lost = ends.total() - ends["right"]
    assert set(ends) <= {"right", "status 500", "status 503", "connection closed"}, ends
    # A client had one request there at most, and perhaps one more before the proxy knew.
    assert lost <= 32, ends


def test_what_a_killed_front_was_relaying_leaves_the_engines_long_before_it_would_have_ended(app: App) -> None:
    body = {"model": "orthrus", "prompt": "x", "stream": True, "max_tokens": 500, "fake": {"gap_s": 0.2}}  # 100 s

    async def stream(http: httpx.AsyncClient) -> str:
        try:
            async with http.stream("POST", COMPLETE, json=body) as answer:
                async for _ in answer.aiter_bytes():
                    pass
                return f"ended with status {answer.status_code}"
        except httpx.TransportError:
            return "connection closed"

    def num_open() -> tuple[int, int]:
        return sum(front["open"] for front in app.info("Front")), sum(e["in_engine"] for e in app.info("Engine"))

    async def act() -> None:
        async with httpx.AsyncClient(base_url=app.url, timeout=60) as http:
            asking = [asyncio.create_task(stream(http)) for _ in range(12)]
            await asyncio.to_thread(until, lambda: num_open() == (12, 12), 30)
            os.kill(front_pids(app)[0], signal.SIGKILL)
            await asyncio.to_thread(until, lambda: 0 < sum(task.done() for task in asking) < 12, 20)
            await asyncio.to_thread(until, lambda: len(set(num_open())) == 1 and num_open()[1] < 12, 20)
            for task in asking:
                task.cancel()  # the rest leave, as clients may
            await asyncio.wait(asking)

    asyncio.run(act())


def address_of(app: App) -> tuple[str, int, str]:
    url = httpx.URL(app.url)
    return url.host, url.port or 80, url.path


def raw_request(app: App, path: str, body: dict[str, Any]) -> bytes:
    host, port, prefix = address_of(app)
    raw = json.dumps(body).encode()
    head = (
        f"POST {prefix}{path} HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(raw)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + raw


async def slow_sender(app: App, number: int) -> bytes:
    """Sends its request byte by byte, over about two seconds; returns the answer."""
    reader, writer = await asyncio.open_connection(*address_of(app)[:2])
    for byte in raw_request(app, EMBED, {"model": "orthrus-embed", "input": "x" * number}):
        writer.write(bytes([byte]))
        await asyncio.sleep(0.01)
    answer = await reader.read()
    writer.close()
    return answer


async def slow_reader(app: App, number: int) -> bytes:
    """Has room for little, and takes it a hundred bytes at a time; returns the answer."""
    taking = socket.socket()
    taking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    taking.setblocking(False)
    await asyncio.get_running_loop().sock_connect(taking, address_of(app)[:2])
    reader, writer = await asyncio.open_connection(sock=taking, limit=256)
    writer.write(raw_request(app, COMPLETE, {"model": "orthrus", "prompt": "x", "stream": True, "max_tokens": 300}))
    answer = b""
    while part := await reader.read(100):
        answer += part
        await asyncio.sleep(0.005)
    writer.close()
    return answer


def test_slow_clients_get_their_answers_and_hold_up_nobody(app: App) -> None:
    async def act() -> tuple[list[bytes], list[bytes], list[float]]:
        slow = [asyncio.create_task(slow_sender(app, number)) for number in range(1, 21)]
        reading = [asyncio.create_task(slow_reader(app, number)) for number in range(20)]
        took_s: list[float] = []
        async with httpx.AsyncClient(base_url=app.url, timeout=30) as http:
            while not all(task.done() for task in (*slow, *reading)):
                began_s = time.monotonic()
                assert (await http.post(EMBED, json={"model": "orthrus-embed", "input": "quick"})).status_code == 200
                took_s.append(time.monotonic() - began_s)
                # A request that is still being sent is no request yet: nobody is charged for it.
        return await asyncio.gather(*slow), await asyncio.gather(*reading), took_s

    sent, read, took_s = asyncio.run(act())
    for number, answer in enumerate(sent, 1):
        assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
        assert f'"embedding":[{float(number)},1.0]'.encode() in answer
    assert all(b'"text": "t299"' in answer and b"[DONE]" in answer for answer in read)
    assert len(took_s) > 3
    assert max(took_s) < 10  # the slow ones take longer than any of these


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_half_closed_connection_gets_its_answer_or_is_closed_and_leaves_nothing(app: App, is_stream: bool) -> None:
    """Whoever sends no more may still want to read. Which of the two it is, is not settled among servers."""
    body = {"model": "orthrus", "prompt": "x", "max_tokens": 40, "stream": is_stream, "fake": {"gap_s": 0.02}}
    ends = Counter[str]()
    for _ in range(4):
        with socket.create_connection(address_of(app)[:2], timeout=30) as connection:
            connection.sendall(raw_request(app, COMPLETE, body))
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while part := connection.recv(65536):
                    answer += part
        ends["answered" if b"t39" in answer else "closed" if not answer else "cut"] += 1
    assert ends.total() == 4
    assert "cut" not in ends or is_stream, ends
