"""Asks the engine's core for a sign of life, all the time, and says when there was none for too long.

The core answers between two steps, so a core that is stuck within a step answers nothing. Guards: a slow step is no stall, and
neither is an event loop that was late itself (the limit is counted in slices, and a late loop loses one of them); a young core,
which may compile at its first requests, gets more time. Leaves out what is done about a stall (`engine_replica.py`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from orthrus_serve.telemetry.log import event_log

log = event_log(__name__)

SLICES = 8
# Until a core has made this many steps it may be compiling, and the limit is longer by this factor.
YOUNG_STEPS, YOUNG_FACTOR = 100, 5.0


@dataclass(frozen=True)
class PulseLimits:
    """How long a core may be silent.

    Attributes:
        stall_s: then it is called stalled, and gets no more requests.
        replace_after_s: so long after that, its replica is replaced.
    """

    stall_s: float
    replace_after_s: float


class CorePulse:
    """The pulse of one core.

    Args:
        ask: a call that the core answers with a report between two steps, busy or idle. What it raises counts as an answer:
            the end of a core is noticed elsewhere.

    Attributes:
        problem: what is wrong, as a sentence, or None.
        must_replace: set when the core was stalled for too long to wait any more.
    """

    def __init__(self, ask: Callable[[], Awaitable[Mapping[str, Any]]], limits: PulseLimits) -> None:
        self._ask = ask
        self._limits = limits
        self._num_steps = 0
        self.problem: str | None = None
        self.must_replace = asyncio.Event()

    async def run(self) -> NoReturn:
        """Asks until it is cancelled."""
        while True:
            asking = asyncio.ensure_future(self._ask())
            try:
                await self._until_answered(asking)
            finally:
                asking.cancel()
            self._take(asking)
            await asyncio.sleep(self._limits.stall_s / SLICES)

    async def _until_answered(self, asking: "asyncio.Future[Mapping[str, Any]]") -> None:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        num_slices = 0
        stall_s = self._limits.stall_s * (YOUNG_FACTOR if self._num_steps < YOUNG_STEPS else 1.0)
        while not (await asyncio.wait({asking}, timeout=stall_s / SLICES))[0]:
            num_slices += 1
            silent_s = clock() - began_s
            if num_slices < SLICES:
                continue
            if self.problem is None:
                log.error("core_stalled", silent_s=round(silent_s, 1))
            self.problem = f"the engine core is stalled: it has not answered for {silent_s:.0f} s"
            if silent_s >= stall_s + self._limits.replace_after_s:
                self.must_replace.set()

    def _take(self, asking: "asyncio.Future[Mapping[str, Any]]") -> None:
        if asking.exception() is None:
            self._num_steps = asking.result().get("totals", {}).get("steps", 0)
        if self.problem is not None:
            log.warning("core_answers_again")
        self.problem = None
