"""Decides when requests start. Pure: times in seconds from the start of a stage, randomness as an argument.

Open loop: a schedule that does not know how long answers take. Closed loop: a fixed number of clients, each of which sends its
next request when its last one ended; there is no schedule, only the moment at which each client begins. Leaves out what is
sent (`workload.py`) and when to stop (`stop.py`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Item = TypeVar("Item")


@dataclass(frozen=True)
class ClosedLoop:
    """`clients` requests in flight at all times. Client i begins at i ÷ clients × `ramp_s`: they do not march in step."""

    clients: int
    ramp_s: float = 0.0


@dataclass(frozen=True)
class Constant:
    """Evenly spaced, `rate` per second, the first at 0."""

    rate: float


@dataclass(frozen=True)
class Poisson:
    """Independent arrivals: exponential gaps with mean 1 ÷ `rate` seconds."""

    rate: float


@dataclass(frozen=True)
class Gamma:
    """Gamma-distributed gaps with mean 1 ÷ `rate` and coefficient of variation `variation`: 1 is Poisson, above is bursty."""

    rate: float
    variation: float


@dataclass(frozen=True)
class Ramp:
    """Poisson arrivals whose rate changes in steps: (rate per second, seconds) each. Ends with the last step."""

    steps: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Burst:
    """`count` requests as one block: `per_s` says how fast a client machine sends them without lagging behind itself."""

    count: int
    per_s: float
    after_s: float = 0.0


@dataclass(frozen=True)
class Replay:
    """The given times, ascending, divided by `speed`."""

    times_s: tuple[float, ...]
    speed: float = 1.0


OpenLoop = Constant | Poisson | Gamma | Ramp | Burst | Replay
Arrivals = ClosedLoop | OpenLoop


def schedule(arrivals: OpenLoop, rng: np.random.Generator) -> Iterator[float]:
    """Arrival times, ascending. Endless for Constant, Poisson and Gamma; finite for Ramp, Burst and Replay."""
    match arrivals:
        case Constant(rate):
            return (index / rate for index in count())
        case Poisson(rate):
            return _renewal(lambda: rng.exponential(1.0 / rate, size=1024))
        case Gamma(rate, variation):
            # A gamma with shape k has a coefficient of variation of 1 ÷ √k.
            shape = 1.0 / variation**2
            return _renewal(lambda: rng.gamma(shape, 1.0 / (rate * shape), size=1024))
        case Ramp(steps):
            return _ramp(steps, rng)
        case Burst(size, per_s, after_s):
            return (after_s + index / per_s for index in range(size))
        case Replay(times_s, speed):
            return (time_s / speed for time_s in times_s)


def share_of_schedule(items: Iterator[Item], worker: int, num_workers: int) -> Iterator[Item]:
    """Every `num_workers`-th item from the `worker`-th on: together the workers send the schedule exactly once."""
    return islice(items, worker, None, num_workers)


def share_of_count(total: int, worker: int, num_workers: int) -> int:
    """This worker's part of `total` clients or requests; the parts differ by at most one and add up to `total`."""
    return total // num_workers + (1 if worker < total % num_workers else 0)


def start_of_client(loop: ClosedLoop, client: int) -> float:
    """When client number `client` (over all workers) sends its first request."""
    return loop.ramp_s * client / loop.clients


def _renewal(draw_gaps: Callable[[], NDArray[np.float64]]) -> Iterator[float]:
    now_s = 0.0
    while True:
        for gap_s in draw_gaps():
            now_s += float(gap_s)
            yield now_s


def _ramp(steps: tuple[tuple[float, float], ...], rng: np.random.Generator) -> Iterator[float]:
    begin_s = 0.0
    for rate, duration_s in steps:
        now_s = begin_s + float(rng.exponential(1.0 / rate))
        while now_s < begin_s + duration_s:
            yield now_s
            now_s += float(rng.exponential(1.0 / rate))
        begin_s += duration_s
