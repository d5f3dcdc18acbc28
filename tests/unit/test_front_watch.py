"""Calls of a Front that is dead are left; nobody else's are, whatever is known of their Fronts."""

import asyncio
import contextlib
from typing import Any

from orthrus_serve.serving.engine_reports import OpenCalls
from orthrus_serve.serving.front_watch import leave_with_fronts
from orthrus_serve.serving.tunnel import TunnelRequest, run_app

ASK = TunnelRequest("POST", "/v1/completions", b"", [], b"{}")


async def watched(calls: OpenCalls, is_alive: Any, until: Any) -> None:
    watching = asyncio.create_task(leave_with_fronts(calls, is_alive, gap_s=0.001))
    async with asyncio.timeout(10):
        while not until():  # noqa: ASYNC110 - what it waits for happens in another thread
            await asyncio.sleep(0.001)
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching


async def test_only_the_calls_of_a_dead_front_are_left_and_each_front_is_asked_about_in_turn() -> None:
    calls, asked = OpenCalls(), list[str]()
    dead = [calls.begin("b", f"r{number}", 1, 1) for number in range(3)]
    others = [calls.begin(front, front, 1, 1) for front in ("a", "c", "")]

    def is_alive(front: str) -> bool:
        asked.append(front)
        if front == "c":
            raise RuntimeError("the control store does not answer")
        return front != "b"

    await watched(calls, is_alive, lambda: len(asked) > 8)
    assert all(call.left.is_set() for call in dead)
    assert not any(call.left.is_set() for call in others)
    assert asked[:4] == ["a", "b", "c", "a"]


async def test_an_idle_replica_asks_nothing() -> None:
    calls, asked = OpenCalls(), list[str]()
    calls.end(calls.begin("a", "r", 1, 1))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.05):
            await leave_with_fronts(calls, lambda front: bool(asked.append(front)), gap_s=0.001)
    assert asked == []


async def test_an_app_whose_call_is_left_is_told_that_its_client_is_gone_and_ends_the_reply() -> None:
    heard: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        heard.append((await receive())["type"])

    left = asyncio.Event()
    async with asyncio.timeout(10):
        items = []
        async for item in run_app(app, ASK, left=left):
            items.append(item)
            if isinstance(item, bytes):
                left.set()
    assert heard == ["http.disconnect"]
    assert items[1:] == [b"data: 1\n\n"]  # and no error event: nobody is there to read it
