"""What a run does, stage by stage: which requests, in what order, arriving how. Pure; no settings, no server.

A stage is one or more streams that run at the same time under one stop rule; a run is a list of stages, one after the other.
Every worker derives its own share from the same stage, so that the shares add up to what was asked for exactly.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from loadgen.arrivals import Arrivals, ClosedLoop, share_of_count
from loadgen.lengths import Length, draw
from loadgen.records import Kind
from loadgen.stop import StopRule


@dataclass(frozen=True)
class Work:
    """One request to make: its kind and how many tokens it should have."""

    kind: Kind
    prompt_tokens: int
    output_tokens: int = 0


@dataclass(frozen=True)
class SessionWork:
    """One session to run: its number over all workers, how many hops, how many documents each hop retrieves."""

    number: int
    documents: tuple[int, ...]
    output_tokens: tuple[int, ...]

    @property
    def hops(self) -> int:
        """How often it retrieves and generates."""
        return len(self.documents)


@dataclass(frozen=True)
class Mix:
    """Endless requests, embed with probability `embed_share`."""

    embed_share: float
    embed_tokens: Length
    generate_tokens: Length
    output_tokens: Length


@dataclass(frozen=True)
class Listed:
    """The given requests in the given order."""

    works: tuple[Work, ...]


@dataclass(frozen=True)
class Sessions:
    """Endless sessions with lengths drawn for each."""

    hops: Length
    documents: Length
    output_tokens: Length


Content = Mix | Listed | Sessions
AnyWork = Work | SessionWork


@dataclass(frozen=True)
class Stream:
    """Arrivals and what arrives."""

    arrivals: Arrivals
    content: Content


@dataclass(frozen=True)
class Stage:
    """`warmup_s` None: until every request of the first burst has ended. `drain_s`: how long to wait for answers at the end.

    A steady stage is measured from the end of its warm-up to the cut-off; another (a block, a phase, a trace) as a whole, from
    its start to its last answer.
    """

    name: str
    streams: tuple[Stream, ...]
    stop: StopRule
    warmup_s: float | None
    drain_s: float
    timeout_s: float
    steady: bool = True

    @property
    def clients(self) -> int:
        """Clients of all closed loops; 0 in an open loop."""
        return sum(stream.arrivals.clients for stream in self.streams if isinstance(stream.arrivals, ClosedLoop))


@dataclass(frozen=True)
class Place:
    """Which worker, of how many, in which run: what seeds and shares depend on."""

    worker: int
    num_workers: int
    seed: int


def rng_for(place: Place, *purpose: int) -> np.random.Generator:
    """A generator of this worker's own: workers never draw the same numbers, and neither do two purposes of one worker."""
    return np.random.default_rng([place.seed, 1 + place.worker, *purpose])


def shared_rng(seed: int, *purpose: int) -> np.random.Generator:
    """A generator that is the same in all workers: for schedules, of which each takes its part."""
    return np.random.default_rng([seed, 0, *purpose])


def stop_share(rule: StopRule, place: Place) -> StopRule:
    """This worker's part of the stage's number of requests; times and ratios hold for all."""
    if rule.max_requests is None:
        return rule
    return replace(rule, max_requests=share_of_count(rule.max_requests, place.worker, place.num_workers))


def clients_of(loop: ClosedLoop, place: Place) -> range:
    """The numbers of this worker's clients."""
    return range(place.worker, loop.clients, place.num_workers)


def works_of(content: Content, place: Place, rng: np.random.Generator) -> Iterator[AnyWork]:
    """What this worker sends, in order. `rng` is the worker's own."""
    match content:
        case Listed(works):
            return islice(works, place.worker, None, place.num_workers)
        case Mix():
            return _mixed(content, rng)
        case Sessions():
            return _sessions(content, place, rng)


def _mixed(mix: Mix, rng: np.random.Generator) -> Iterator[Work]:
    while True:
        if rng.random() < mix.embed_share:
            yield Work("embed", draw(mix.embed_tokens, rng))
        else:
            yield Work("generate", draw(mix.generate_tokens, rng), draw(mix.output_tokens, rng))


def _sessions(sessions: Sessions, place: Place, rng: np.random.Generator) -> Iterator[SessionWork]:
    number = place.worker
    while True:
        hops = range(draw(sessions.hops, rng))
        yield SessionWork(
            number=number,
            documents=tuple(draw(sessions.documents, rng) for _ in hops),
            output_tokens=tuple(draw(sessions.output_tokens, rng) for _ in hops),
        )
        number += place.num_workers
