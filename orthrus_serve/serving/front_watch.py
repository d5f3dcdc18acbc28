"""Ends what a dead Front was relaying: its calls would go on for nobody, until their answers were complete.

Serve cancels a call when its caller says so; a Front that is killed says nothing. Guards: a Front that drains is alive, and so
is one of which nothing is known; Ray's control store is asked about one Front a second, however many there are. Leaves out how
a call's app learns that its client left (`tunnel.py`).
"""

import asyncio
from collections.abc import Callable
from typing import NoReturn

from orthrus_serve.serving.engine_reports import OpenCalls
from orthrus_serve.telemetry.log import event_log

log = event_log(__name__)

ASK_GAP_S = 1.0


async def leave_with_fronts(calls: OpenCalls, is_alive: Callable[[str], bool], gap_s: float = ASK_GAP_S) -> NoReturn:
    """Until cancelled. `is_alive` may block, and says whether the process of that Front runs."""
    last = ""
    while True:
        await asyncio.sleep(gap_s)
        fronts = sorted(front for front in calls.fronts if front)
        if not fronts:
            continue
        # The next one in order, from the beginning after the last.
        last = next((front for front in fronts if front > last), fronts[0])
        try:
            if await asyncio.to_thread(is_alive, last):
                continue
        except Exception as error:  # noqa: BLE001 - whatever Ray raises, nothing is known then
            log.warning("front_not_looked_up", front=last, cause=repr(error)[:300])
            continue
        log.error("front_gone", front=last, num_calls=calls.leave(last))
