"""Values for tests with everything defaulted."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from loadgen.arrivals import Arrivals, ClosedLoop
from loadgen.client import Client, Sampling, Target, make_session
from loadgen.client_verdict import ClientLimits
from loadgen.lengths import Fixed
from loadgen.mock_server import MockServer, Script, start
from loadgen.prompts import PromptTable
from loadgen.records import ClientHealth, Record, SessionRecord, StageResult
from loadgen.stages import Content, Mix, Place, Stage, Stream
from loadgen.stop import StopRule

LIMITS = ClientLimits(schedule_lag_p99_s=0.05, loop_lag_p99_s=0.05, turnaround_p99_s=0.05, cpu_ratio=0.9)
# For runs on a machine that others load as well: there, lag is not what is being tested.
PATIENT = ClientLimits(schedule_lag_p99_s=60, loop_lag_p99_s=60, turnaround_p99_s=60, cpu_ratio=10)


def sse(*events: str) -> bytes:
    return b"".join(f"data: {event}\n\n".encode() for event in events)


def text_event(text: str, finish: str | None = None) -> str:
    end = "null" if finish is None else f'"{finish}"'
    return f'{{"choices":[{{"index":0,"text":"{text}","finish_reason":{end}}}]}}'


def chat_event(delta: str, finish: str | None = None) -> str:
    end = "null" if finish is None else f'"{finish}"'
    return f'{{"choices":[{{"index":0,"delta":{delta},"finish_reason":{end}}}]}}'


def usage_event(prompt: int, completion: int) -> str:
    return f'{{"choices":[],"usage":{{"prompt_tokens":{prompt},"completion_tokens":{completion}}}}}'


def mix(embed_share: float = 0.5, output_tokens: int = 4) -> Mix:
    return Mix(embed_share, Fixed(40), Fixed(40), Fixed(output_tokens))


def stage(
    arrivals: Arrivals | None = None, content: Content | None = None, stop: StopRule | None = None, **changes: Any
) -> Stage:
    fields: dict[str, Any] = {"warmup_s": 0.0, "drain_s": 30.0, "timeout_s": 30.0, "steady": True, **changes}
    stream = Stream(arrivals or ClosedLoop(2), content or mix())
    return Stage("stage", (stream,), stop or StopRule(max_requests=10), **fields)


def place(worker: int = 0, num_workers: int = 1, seed: int = 5) -> Place:
    return Place(worker, num_workers, seed)


def word_table(num_words: int = 4000) -> PromptTable:
    """Every word is one token, as the scripted server counts."""
    words = tuple(f"word{number}" for number in range(num_words))
    return PromptTable(
        words=words,
        sizes=np.ones(num_words, dtype=np.int64),
        first_words=words[:50],
        first_sizes=np.ones(50, dtype=np.int64),
        extra={},
        sizing="one word, one token",
    )


def record(sent_s: float, ended_s: float, **fields: Any) -> Record:
    return Record(**{"stage": "stage", "kind": "embed", "worker": 0, "sent_s": sent_s, "ended_s": ended_s, **fields})


def session(started_s: float, ended_s: float, **fields: Any) -> SessionRecord:
    base: dict[str, Any] = {"stage": "stage", "worker": 0, "session": 0, "question_id": "q", "hops": 2, "asked_hops": 2}
    return SessionRecord(**{**base, "started_s": started_s, "ended_s": ended_s, **fields})


def result(
    records: Sequence[Record], cut_off_s: float, sessions: Sequence[SessionRecord] = (), started_s: float = 0.0
) -> StageResult:
    return StageResult(
        stage="stage",
        worker=0,
        started_s=started_s,
        cut_off_s=cut_off_s,
        ended_s=max([cut_off_s, *(one.ended_s for one in records)]),
        stop_reason="time",
        in_flight_at_cut_off=0,
        health=ClientHealth(worker=0),
        records=list(records),
        sessions=list(sessions),
    )


def target(url: str, api: Any = "completions") -> Target:
    return Target("mock", url, url, (f"{url}/metrics",), "mock-embed", "mock", api)


@asynccontextmanager
async def served(script: Script, api: Any = "completions") -> AsyncIterator[tuple[MockServer, Client]]:
    """A scripted server and a client of it, on this event loop and its clock."""
    import asyncio

    server, runner, url = await start(script)
    try:
        async with make_session() as http:
            now = asyncio.get_running_loop().time
            yield server, Client(target(url, api), Sampling(0.7, True, True, {}), http, now)
    finally:
        await runner.cleanup()
