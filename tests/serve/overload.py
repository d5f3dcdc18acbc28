"""Clients that arrive whatever the answers do, and what became of each. For tests and measurements of admission."""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from orthrus_serve.types import RequestKind

PATHS: dict[RequestKind, str] = {"embed": "/v1/embeddings", "generate": "/v1/completions"}


@dataclass(frozen=True)
class Due:
    """A request that is to be sent."""

    at_s: float
    kind: RequestKind
    num_tokens: int
    body: dict[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What came of it; times from sending it, in s. `first_s` is the first byte of a body."""

    due: Due
    status: int
    first_s: float
    e2e_s: float
    headers: Mapping[str, str]

    def is_good(self, goal_s: float) -> bool:
        """Answered, with its first token (a generation) or whole (an embedding) in time."""
        return self.status == 200 and (self.first_s if self.due.kind == "generate" else self.e2e_s) <= goal_s


def poisson(
    rng: random.Random,
    seconds: float,
    tokens_per_s: float,
    make: Callable[[random.Random], tuple[RequestKind, int, Any]],
) -> list[Due]:
    """Requests by a Poisson process that offers so many tokens a second. `make` returns kind, tokens and body."""
    due: list[Due] = []
    at_s = 0.0
    while True:
        kind, num_tokens, body = make(rng)
        at_s += rng.expovariate(1.0) * num_tokens / tokens_per_s
        if at_s >= seconds:
            return due
        due.append(Due(at_s, kind, num_tokens, body))


async def play(url: str, requests: Sequence[Due]) -> list[Answer]:
    """Sends each at its time."""
    began_s = time.monotonic()

    async def ask(session: aiohttp.ClientSession, due: Due) -> Answer:
        await asyncio.sleep(max(0.0, began_s + due.at_s - time.monotonic()))
        sent_s = time.monotonic()
        async with session.post(url + PATHS[due.kind], json=due.body, headers=due.headers) as response:
            await response.content.readany()
            first_s = time.monotonic() - sent_s
            await response.read()
            return Answer(due, response.status, first_s, time.monotonic() - sent_s, dict(response.headers))

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(300)) as session:
        return await asyncio.gather(*[ask(session, due) for due in requests])


def goodput(answers: Sequence[Answer], goal_s: float, from_s: float, to_s: float) -> float:
    """Tokens a second of requests due in that span that were answered in time."""
    within = (a for a in answers if from_s <= a.due.at_s < to_s)
    return sum(a.due.num_tokens for a in within if a.is_good(goal_s)) / (to_s - from_s)
