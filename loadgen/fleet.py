"""Runs the worker processes: starts them, tells all of them to begin a stage at the same moment, gathers what they send.

Guards: a worker that dies is an error, never a smaller load; every wait is bounded by what the workers themselves are bounded
by. Leaves out statistics and what the live table shows.
"""

import contextlib
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import cast

import msgspec

from loadgen.errors import WorkerError
from loadgen.records import StageResult
from loadgen.worker import Failure, Go, Job, Message, Result, Snapshot, main

START_TIMEOUT_S = 120.0
HEAD_START_S = 0.25  # between telling the workers and the start of a stage
GRACE_S = 60.0  # beyond a stage's own bounds, for sending results

_decode: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
OnSnapshot = Callable[[Snapshot], None]


@dataclass(frozen=True)
class _Worker:
    process: SpawnProcess
    pipe: Connection


class Fleet:
    """`num_workers` processes for one job. Use as a context manager: they end with it."""

    def __init__(self, job: Job, num_workers: int) -> None:
        self._job = job
        self._num_workers = num_workers
        self._workers: list[_Worker] = []

    def __enter__(self) -> "Fleet":
        context = multiprocessing.get_context("spawn")
        for number in range(self._num_workers):
            ours, theirs = context.Pipe()
            place = replace(self._job.place, worker=number, num_workers=self._num_workers)
            process = context.Process(target=main, args=(replace(self._job, place=place), theirs), daemon=True)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, cast(Connection, ours)))
        for worker in self._workers:
            self._await_ready(worker)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.pipe.send(None)
        for worker in self._workers:
            worker.process.join(timeout=5.0 if error is None else 0.5)
            if worker.process.is_alive():
                worker.process.terminate()
                worker.process.join(timeout=5.0)
            worker.pipe.close()

    def run_stage(self, index: int, on_snapshot: OnSnapshot) -> list[StageResult]:
        """All workers' results of stage number `index`.

        Raises:
            WorkerError: a worker died, failed, or did not end in time.
        """
        start_s = time.monotonic() - self._job.zero_s + HEAD_START_S
        for worker in self._workers:
            worker.pipe.send(Go(index, start_s))
        results: dict[Connection, StageResult] = {}
        deadline_s = self._deadline_s(index)
        pipes = [worker.pipe for worker in self._workers]
        while len(results) < len(pipes):
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise WorkerError(f"{len(pipes) - len(results)} workers did not end their stage in time")
            for pipe in wait([pipe for pipe in pipes if pipe not in results], timeout=left_s):
                message = _receive(cast(Connection, pipe))
                if isinstance(message, Result):
                    results[cast(Connection, pipe)] = message.result
                elif isinstance(message, Failure):
                    raise WorkerError(f"worker {message.worker}: {message.reason}")
                else:
                    on_snapshot(message)
        return [results[pipe] for pipe in pipes]

    def _deadline_s(self, index: int) -> float | None:
        """When a stage must have ended; None if only its number of requests bounds it."""
        stage = self._job.stages[index]
        if stage.stop.max_duration_s is None:
            return None
        return time.monotonic() + HEAD_START_S + stage.stop.max_duration_s + stage.drain_s + GRACE_S

    def _await_ready(self, worker: _Worker) -> None:
        if not worker.pipe.poll(START_TIMEOUT_S):
            raise WorkerError(f"a worker did not start within {START_TIMEOUT_S:g} s")
        try:
            greeting = worker.pipe.recv_bytes()
        except EOFError:
            raise WorkerError("a worker died while it started") from None
        if greeting != b"ready":
            failure = _decode.decode(greeting)
            raise WorkerError(failure.reason if isinstance(failure, Failure) else "a worker did not start as expected")


def _receive(pipe: Connection) -> Message:
    try:
        return _decode.decode(pipe.recv_bytes())
    except EOFError:
        raise WorkerError("a worker died") from None


def silent(snapshot: Snapshot) -> None:
    """Shows nothing."""
    del snapshot
