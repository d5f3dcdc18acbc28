"""One process of the load generator: takes a job, runs its share of each stage when told, sends back what happened.

Talks to the parent over one pipe. Commands: `Go(index, start_s)`, None to end. Answers: "ready", snapshots, results.
"""

import asyncio
import gc
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import uvloop
from numpy.typing import NDArray

from loadgen.client import Client, Sampling, Target, make_session
from loadgen.corpus import Passage
from loadgen.iter_retgen import Library, RetGenSessions
from loadgen.prompts import PromptMaker, PromptTable
from loadgen.questions import Question
from loadgen.records import SessionRecord, StageResult
from loadgen.requester import Recorder, SingleRequests
from loadgen.stage_run import StageRun
from loadgen.stages import Place, Stage, rng_for
from loadgen.vector_index import IndexKind, VectorIndex

SNAPSHOT_S = 0.5
PROMPT_PURPOSE = 1_000  # tells the prompts' random numbers from those of the stages


@dataclass(frozen=True)
class LibraryParts:
    """What a worker makes its `Library` from: plain values that cross a process border."""

    passages: tuple[Passage, ...]
    vectors: NDArray[np.float32]
    index: IndexKind
    questions: tuple[Question, ...]
    query_prefix: str
    passage_prefix: str
    document_words: int
    embed_documents: bool

    def open(self) -> Library:
        """The library with its index built."""
        return Library(
            passages=self.passages,
            index=VectorIndex(self.vectors, self.index),
            questions=self.questions,
            query_prefix=self.query_prefix,
            passage_prefix=self.passage_prefix,
            document_words=self.document_words,
            embed_documents=self.embed_documents,
        )


@dataclass(frozen=True)
class Job:
    """All that a worker needs. `zero_s`: the monotonic time that the run's clock counts from, the same in all processes."""

    place: Place
    target: Target
    sampling: Sampling
    stages: tuple[Stage, ...]
    table: PromptTable
    library: LibraryParts | None
    zero_s: float


@dataclass(frozen=True)
class Go:
    """Run the stage of this number, from this time on."""

    index: int
    start_s: float


class Snapshot(msgspec.Struct, frozen=True, tag=True):
    """How far a worker is in the running stage, for the live table; latencies are those since the last snapshot."""

    worker: int
    started: int
    ended: int
    errors: int
    in_flight: int
    embeds: int
    generations: int
    e2e_s: list[float]
    ttft_s: list[float]


class Failure(msgspec.Struct, frozen=True, tag=True):
    """The worker cannot go on."""

    worker: int
    reason: str


class Result(msgspec.Struct, frozen=True, tag=True):
    """A stage is done."""

    result: StageResult


Message = Snapshot | Failure | Result


def main(job: Job, pipe: Connection) -> None:
    """Entry point of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    try:
        uvloop.run(_serve(job, pipe))
    except (EOFError, BrokenPipeError):
        pass  # the parent is gone
    except Exception as error:  # noqa: BLE001 - whatever it was, the parent must learn of it
        pipe.send_bytes(msgspec.msgpack.encode(Failure(job.place.worker, f"{type(error).__name__}: {error}")))


async def _serve(job: Job, pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    library = None if job.library is None else job.library.open()
    gc.freeze()  # what is loaded now stays: later collections, which stop the clock, have less to look at
    with ThreadPoolExecutor(1) as listener, ThreadPoolExecutor(1) as searcher:
        async with make_session() as session:
            pipe.send_bytes(b"ready")
            while True:
                command: Any = await loop.run_in_executor(listener, pipe.recv)
                if not isinstance(command, Go):
                    return
                result = await run_stage(job, command, session, library, searcher, pipe.send_bytes)
                pipe.send_bytes(msgspec.msgpack.encode(Result(result)))


async def run_stage(
    job: Job,
    go: Go,
    session: Any,
    library: Library | None,
    searcher: ThreadPoolExecutor,
    send: Callable[[bytes], None],
) -> StageResult:
    """This worker's share of one stage, from its start to its last answer."""

    def now() -> float:
        return time.monotonic() - job.zero_s

    stage = job.stages[go.index]
    client = Client(job.target, job.sampling, session, now)
    recorder = Recorder(stage.name, job.place.worker, now)
    sessions: list[SessionRecord] = []
    if library is not None:
        execute = RetGenSessions(client, recorder, library, searcher, stage.timeout_s, sessions)
    else:
        prompts = PromptMaker(job.table, rng_for(job.place, PROMPT_PURPOSE, go.index))
        execute = SingleRequests(client, prompts, recorder, stage.timeout_s)
    run = StageRun(stage, go.index, job.place, execute, now)
    reporter = asyncio.create_task(_report(run, recorder, job.place.worker, send))
    try:
        end = await run.run(go.start_s)
    finally:
        reporter.cancel()
    return StageResult(
        stage=stage.name,
        worker=job.place.worker,
        started_s=end.started_s,
        cut_off_s=end.cut_off_s,
        ended_s=end.ended_s,
        stop_reason=end.reason,
        in_flight_at_cut_off=end.in_flight_at_cut_off,
        health=end.health,
        records=recorder.records,
        sessions=sessions,
    )


async def _report(run: StageRun, recorder: Recorder, worker: int, send: Callable[[bytes], None]) -> None:
    seen = embeds = generations = 0
    while True:
        await asyncio.sleep(SNAPSHOT_S)
        new = [record for record in recorder.records[seen:] if record.ok]
        seen = len(recorder.records)
        embeds += sum(record.kind == "embed" for record in new)
        generations += sum(record.kind == "generate" for record in new)
        snapshot = Snapshot(
            worker=worker,
            started=run.started,
            ended=run.ended,
            errors=run.errors,
            in_flight=run.in_flight,
            embeds=embeds,
            generations=generations,
            e2e_s=[record.e2e_s for record in new[-200:]],
            ttft_s=[record.ttft_s for record in new[-200:] if record.ttft_s is not None],
        )
        send(msgspec.msgpack.encode(snapshot))
