"""Faults of a soak: what can happen to a server's processes, and how it is seen that the server is well again."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
from ray import serve

from tests.serve.conftest import App

WELL_WITHIN_S = 300.0


class NotWellError(Exception):
    """The application was not well again, or not at rest, in time."""


def cores_of(pid: int) -> list[psutil.Process]:
    """The EngineCore processes of the replica with that process id, the oldest first."""
    found = [p for p in psutil.Process(pid).children(recursive=True) if "EngineCore" in " ".join(p.cmdline())]
    return sorted(found, key=lambda core: core.create_time())


def core_of(pid: int) -> psutil.Process:
    """The only one of `cores_of`."""
    (core,) = cores_of(pid)
    return core


def front_pids(app: App) -> list[int]:
    """Processes of this application's Fronts."""
    name = f"ServeReplica:{app.name}:Front"
    return [p.pid for p in psutil.process_iter(["cmdline"]) if name in " ".join(p.info["cmdline"] or ())]


class Faults:
    """Does one thing at a time to a running application, and waits until it is well again."""

    def __init__(self, app: App, num_engines: int, num_fronts: int, seed: int) -> None:
        self._app = app
        self._sizes = num_engines, num_fronts
        self._rng = random.Random(seed)
        self.by_name: dict[str, Callable[[], Awaitable[None]]] = {
            "core killed": self._kill_core,
            "core stopped for a second": self._stop_core_shortly,
            "core stopped for good": self._stop_core,
            "engine replica killed": self._kill_replica,
            "Front killed": self._kill_front,
            "policy switched": self._switch,
        }

    async def inject(self, name: str) -> float:
        """Does it; returns after how many seconds everything was well again."""
        began_s = time.monotonic()
        await self.by_name[name]()
        await self.until_well()
        return time.monotonic() - began_s

    async def until_well(self) -> None:
        """All engines and Fronts answer, and nobody is left out.

        Raises:
            NotWellError: not in time.
        """
        began_s = time.monotonic()
        while not await self._is_well():
            if time.monotonic() - began_s > WELL_WITHIN_S:
                raise NotWellError("the application did not recover")
            await asyncio.sleep(0.3)

    async def until_at_rest(self) -> None:
        """Nothing is charged, open or running anywhere.

        Raises:
            NotWellError: not in time.
        """
        began_s = time.monotonic()
        while rest := await self._unrest():
            if time.monotonic() - began_s > WELL_WITHIN_S:
                raise NotWellError(f"the application did not come to rest: {rest}")
            await asyncio.sleep(0.3)

    async def _info(self, deployment: str) -> list[dict[str, Any]]:
        return await asyncio.to_thread(self._app.info, deployment)

    async def _is_well(self) -> bool:
        engines, fronts = await self._info("Engine"), await self._info("Front")
        return (len(engines), len(fronts)) == self._sizes and not any(front["quarantined"] for front in fronts)

    async def _unrest(self) -> list[Any]:
        engines, fronts = await self._info("Engine"), await self._info("Front")
        if (len(engines), len(fronts)) != self._sizes:
            return [len(engines), len(fronts)]
        held = [(e["open"], e["in_engine"], e["report"].get("running"), e["report"].get("waiting")) for e in engines]
        charged = [(front["open"], front["tokens"], front["loads"]) for front in fronts]
        return [one for one in held if any(one)] + [one for one in charged if any(one)]

    async def _engine(self) -> int:
        """The process id of one engine replica; all were well just now."""
        return self._rng.choice([info["pid"] for info in await self._info("Engine")])

    async def _kill_core(self) -> None:
        pid = await self._engine()
        core_of(pid).kill()
        await _gone(pid)

    async def _stop_core_shortly(self) -> None:
        core = core_of(await self._engine())
        core.suspend()
        await asyncio.sleep(1.0)
        core.resume()

    async def _stop_core(self) -> None:
        pid = await self._engine()
        core = core_of(pid)
        core.suspend()
        await _gone(pid)
        await _gone(core.pid)  # it holds the memory

    async def _kill_replica(self) -> None:
        pid = await self._engine()
        core = core_of(pid)
        os.kill(pid, signal.SIGKILL)
        await _gone(core.pid)

    async def _kill_front(self) -> None:
        pid = self._rng.choice(front_pids(self._app))
        os.kill(pid, signal.SIGKILL)
        await _gone(pid)

    async def _switch(self) -> None:
        wanted = {"topology": self._rng.choice(["orthrus", "hetero_fcfs", "unified_homo"])}
        for deployment in ("Engine", "Front"):
            asked = serve.get_deployment_handle(deployment, self._app.name).broadcast("reconfigure", wanted)
            await asyncio.to_thread(asked.results, timeout_s=30)


async def _gone(pid: int) -> None:
    began_s = time.monotonic()
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() - began_s > WELL_WITHIN_S:
            raise NotWellError(f"process {pid} did not end")
        await asyncio.sleep(0.2)
