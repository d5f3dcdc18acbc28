"""Runs one worker's share of one stage: starts work when its arrivals say so, stops when the rule says so, and always ends.

Guards: open-loop arrivals never wait for answers; a closed-loop client sends as soon as its own answer is in, whatever the
others do; never more in flight than asked. Watches itself: schedule lag, event-loop lag, turnaround, CPU. Leaves out what a
piece of work is (`Execute`).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass

from loadgen.arrivals import ClosedLoop, schedule, share_of_schedule, start_of_client
from loadgen.records import ClientHealth
from loadgen.stages import AnyWork, Place, Stage, clients_of, rng_for, shared_rng, stop_share, works_of
from loadgen.stop import Progress, StopReason, reason_to_stop

LAG_SAMPLE_S = 0.02
SENDS_PER_TURN = 8  # of a sender that is late: enough to catch up, few enough for answers to be read in time
MAX_HEALTH_SAMPLES = 200_000  # of each kind and stage; later ones are dropped, which a report of percentiles survives

# Makes one piece of work happen and records it; true if it succeeded. `scheduled_s` is None in closed loops.
Execute = Callable[[AnyWork, float | None], Awaitable[bool]]


@dataclass(frozen=True)
class StageEnd:
    """When and why the stage stopped sending, what was in flight then, and how the client felt."""

    started_s: float
    cut_off_s: float
    ended_s: float
    reason: StopReason
    in_flight_at_cut_off: int
    health: ClientHealth


class StageRun:
    """One stage in one worker. `now` is the run's clock; `index` is the stage's number, for seeds."""

    def __init__(self, stage: Stage, index: int, place: Place, execute: Execute, now: Callable[[], float]) -> None:
        self._stage = stage
        self._index = index
        self._place = place
        self._execute = execute
        self._now = now
        self._rule = stop_share(stage.stop, place)
        self._start_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._bug: BaseException | None = None
        self._reason: StopReason = "schedule ended"
        self._cut_off_s: float | None = None
        self._in_flight_at_cut_off = 0
        self._schedule_lag_s: list[float] = []
        self._loop_lag_s: list[float] = []
        self._turnaround_s: list[float] = []
        self._peak_in_flight = 0
        self.in_flight = 0
        self.started = 0
        self.ended = 0
        self.errors = 0

    async def run(self, start_s: float) -> StageEnd:
        """Runs from `start_s` on the run's clock to the last answer, or to the end of the patience for it."""
        self._start_s = start_s
        await _sleep_until(start_s, self._now)
        cpu_s = time.process_time()
        watchers = [asyncio.create_task(self._watch_loop()), asyncio.create_task(self._watch_clock())]
        try:
            await self._send_all()
            self._stop("schedule ended")
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=self._stage.drain_s)
        finally:
            for task in [*watchers, *self._tasks]:
                task.cancel()
            await asyncio.gather(*watchers, *self._tasks, return_exceptions=True)
        if self._bug is not None:
            raise self._bug  # requests fail quietly into records; an exception is a fault of this program
        ended_s = self._now()
        return StageEnd(
            started_s=start_s,
            cut_off_s=ended_s if self._cut_off_s is None else self._cut_off_s,
            ended_s=ended_s,
            reason=self._reason,
            in_flight_at_cut_off=self._in_flight_at_cut_off,
            health=self._health((time.process_time() - cpu_s) / max(ended_s - start_s, 1e-9)),
        )

    async def _send_all(self) -> None:
        """Returns when nothing more will be sent; answers may still be on their way."""
        senders: list[asyncio.Task[None]] = []
        clients: list[asyncio.Task[None]] = []
        for number, stream in enumerate(self._stage.streams):
            works = works_of(stream.content, self._place, rng_for(self._place, self._index, number))
            match stream.arrivals:
                case ClosedLoop() as loop:
                    begins = [start_of_client(loop, client) for client in clients_of(loop, self._place)]
                    clients += [self._keep(self._client(begin_s, works)) for begin_s in begins]
                case _ as arrivals:
                    times = schedule(arrivals, shared_rng(self._place.seed, self._index, number))
                    senders.append(asyncio.create_task(self._open_loop(times, works)))
        try:
            await asyncio.gather(*senders)
            if clients:
                stopping = self._keep(self._until_stopping())
                await asyncio.wait({stopping, *clients}, return_when=asyncio.FIRST_COMPLETED)
                stopping.cancel()
        finally:
            for sender in senders:
                sender.cancel()

    async def _open_loop(self, times: Iterator[float], works: Iterator[AnyWork]) -> None:
        mine = share_of_schedule(times, self._place.worker, self._place.num_workers)
        for at_s, work in zip(mine, works, strict=False):
            scheduled_s = self._start_s + at_s
            # The time limit ends the schedule; an arrival after it does not exist.
            limit_s = self._rule.max_duration_s
            if limit_s is not None and at_s >= limit_s:
                break
            await _sleep_until(scheduled_s, self._now)
            if self._should_stop():
                return
            if len(self._schedule_lag_s) < MAX_HEALTH_SAMPLES:
                self._schedule_lag_s.append(max(self._now() - scheduled_s, 0.0))
            self.started += 1
            self._keep(self._one(work, scheduled_s))
            if self.started % SENDS_PER_TURN == 0:
                await asyncio.sleep(0)  # a sender that is late must not keep answers from being read
        if self._rule.max_duration_s is not None:
            await _sleep_until(self._start_s + self._rule.max_duration_s, self._now)

    async def _client(self, begin_s: float, works: Iterator[AnyWork]) -> None:
        await _sleep_until(self._start_s + begin_s, self._now)
        free_s: float | None = None
        while not self._should_stop() and (work := next(works, None)) is not None:
            self.started += 1
            if free_s is not None and len(self._turnaround_s) < MAX_HEALTH_SAMPLES:
                self._turnaround_s.append(self._now() - free_s)
            await self._one(work, None)
            free_s = self._now()
            await asyncio.sleep(0)  # an answer that needs no waiting must not shut the others out

    async def _one(self, work: AnyWork, scheduled_s: float | None) -> None:
        self.in_flight += 1
        self._peak_in_flight = max(self._peak_in_flight, self.in_flight)
        ok = False
        try:
            self._should_stop()  # if this was the last one, the cut-off is now
            ok = await self._execute(work, scheduled_s)
        finally:
            self.in_flight -= 1
            self.ended += 1
            self.errors += not ok

    def _should_stop(self) -> bool:
        if self._cut_off_s is not None:
            return True
        progress = Progress(self.started, self.ended, self.errors, self._now() - self._start_s)
        reason = reason_to_stop(self._rule, progress)
        if reason is not None:
            self._stop(reason)
        return reason is not None

    def _stop(self, reason: StopReason) -> None:
        if self._cut_off_s is None:
            self._cut_off_s = self._now()
            self._reason = reason
            self._in_flight_at_cut_off = self.in_flight
            self._stopping.set()

    def _keep(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._let_go)
        return task

    def _let_go(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            self._bug = self._bug or bug
            self._stop("errors")

    async def _until_stopping(self) -> None:
        await self._stopping.wait()

    async def _watch_clock(self) -> None:
        """Makes the cut-off happen on time even while every client waits for an answer."""
        if self._rule.max_duration_s is not None:
            await _sleep_until(self._start_s + self._rule.max_duration_s, self._now)
            self._stop("time")

    async def _watch_loop(self) -> None:
        while len(self._loop_lag_s) < MAX_HEALTH_SAMPLES:
            before_s = self._now()
            await asyncio.sleep(LAG_SAMPLE_S)
            self._loop_lag_s.append(max(self._now() - before_s - LAG_SAMPLE_S, 0.0))

    def _health(self, cpu_ratio: float) -> ClientHealth:
        return ClientHealth(
            worker=self._place.worker,
            schedule_lag_s=self._schedule_lag_s,
            loop_lag_s=self._loop_lag_s,
            turnaround_s=self._turnaround_s,
            cpu_ratio=cpu_ratio,
            peak_in_flight=self._peak_in_flight,
        )


async def _sleep_until(deadline_s: float, now: Callable[[], float]) -> None:
    delay_s = deadline_s - now()
    if delay_s > 0:
        await asyncio.sleep(delay_s)
