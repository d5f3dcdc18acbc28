"""The questions of the study: each yields rows of plain data, one per setup tried. Every number comes from a seed.

Two kinds of engine. `shared` computes 1,000 tokens a second, all requests at once: a request of the mix takes 0.25 s alone, and
time is seconds as in serving. `h200` goes in steps, by the product's step plan and measured durations. Leaves out drawing
(`figures.py`), the command (`study.py`), and the questions about topologies (`topologies.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orthrus_serve.sim.batching import BatchingEngine, BatchSpec
from orthrus_serve.sim.cluster import Cluster, Fault, MakeEngine, Setup
from orthrus_serve.sim.engines import SharedEngine
from orthrus_serve.sim.summary import summary
from orthrus_serve.sim.variants import OwnOnly, looks_at
from orthrus_serve.sim.workload import Arrival, Coin, MakeOne, heavy_tailed, poisson

Row = dict[str, Any]
TOKENS_PER_S = 1000.0
UTILISATION = 0.85
WARM_RATIO = 0.25  # of a trace, not counted
SIZES = (4, 16, 64, 256, 1024)
# With small pools more time passes, so that a p99 has about as many requests behind it.
SECONDS = {4: 500.0, 16: 150.0, 64: 50.0, 256: 24.0, 1024: 24.0}


@dataclass(frozen=True)
class Arm:
    """A way to choose, by the name that it has in the figures."""

    name: str
    settings: Mapping[str, Any]


PRODUCT = Arm("least_remaining_tokens", {})
ALL = Arm("least of all", {"make_state": looks_at(None)})
POWER_OF_TWO = Arm("power_of_two", {"rule": "power_of_two"})
RULES = (
    PRODUCT,
    ALL,
    # These two look at nothing that a report says.
    Arm("in_flight_tokens", {"rule": "in_flight_tokens", "has_reports": False}),
    POWER_OF_TWO,
    Arm("round_robin", {"rule": "round_robin", "has_reports": False}),
)


def least_of(num_looked_at: int) -> Arm:
    """The fewest remaining tokens of so many drawn at random."""
    return Arm(f"least of {num_looked_at}", {"make_state": looks_at(num_looked_at)})


def shared(*speeds: float) -> MakeEngine:
    """Shared engines; each in turn has one of these speeds."""
    speeds = speeds or (1.0,)
    return lambda agenda, ended, number: SharedEngine(agenda, TOKENS_PER_S * speeds[number % len(speeds)], ended)


def in_steps(spec: BatchSpec) -> MakeEngine:
    """Engines in steps, all alike."""
    return lambda agenda, ended, _number: BatchingEngine(agenda, spec, ended)


def fronts_of(num_replicas: int) -> int:
    """The product's number, one for two replicas, but never more than the study goes to."""
    return min(64, max(2, num_replicas // 2))


def play(setup: Setup, arm: Arm, trace: Sequence[Arrival], seconds: float, seed: int = 1) -> Row:
    """One run of one arm."""
    played = Cluster(replace(setup, **arm.settings), seed).play(trace)
    return {
        "arm": arm.name,
        "replicas": setup.num_engines,
        "fronts": setup.num_fronts,
        **summary(played, WARM_RATIO * seconds, seconds),
    }


def _heavy(num_replicas: int, seconds: float, *, make_one: MakeOne = heavy_tailed, seed: int = 1) -> list[Arrival]:
    return poisson(make_one, seed, seconds, UTILISATION * num_replicas * TOKENS_PER_S)


def sizes(quick: bool) -> Iterator[Row]:
    """Every rule on pools of 4 to 1,024 replicas, reports as the product spaces them."""
    for num_replicas in SIZES[: 2 if quick else None]:
        seconds = SECONDS[num_replicas] / (100 if quick else 1)
        trace = _heavy(num_replicas, seconds)
        setup = Setup(shared(), num_replicas, fronts_of(num_replicas))
        if num_replicas <= 256:
            best = replace(setup, num_fronts=1, report_gap_s=0.1)
            yield play(best, Arm("one Front that knows", {"make_state": looks_at(None)}), trace, seconds)
        for arm in RULES if num_replicas <= 256 else (PRODUCT, ALL, POWER_OF_TWO):
            yield play(setup, arm, trace, seconds)
        if num_replicas > 4:
            yield play(setup, least_of(2), trace, seconds)


def looked_at(quick: bool) -> Iterator[Row]:
    """How many replicas to look at, by how old what is known of them is."""
    num_replicas, num_fronts, seconds = (16, 8, 2.0) if quick else (64, 32, 30.0)
    trace = _heavy(num_replicas, seconds)
    for gap_s in (0.4, 3.2) if quick else (0.4, 1.6, 6.4):
        setup = Setup(shared(), num_replicas, num_fronts, report_gap_s=gap_s)
        own_only = Arm("least of 8, own requests only", {"make_state": looks_at(8, OwnOnly)})
        for arm in (PRODUCT, least_of(2), least_of(8), ALL, own_only):
            yield {"gap_s": gap_s, **play(setup, arm, trace, seconds)}


def fronts(quick: bool) -> Iterator[Row]:
    """1 to 64 Fronts before 64 replicas."""
    num_replicas, seconds = (16, 2.0) if quick else (64, 30.0)
    trace = _heavy(num_replicas, seconds)
    for num_fronts in (1, 4) if quick else (1, 4, 16, 64):
        setup = Setup(shared(), num_replicas, num_fronts)
        for arm in (PRODUCT, ALL, POWER_OF_TWO):
            yield play(setup, arm, trace, seconds)


def uneven_fronts(quick: bool) -> Iterator[Row]:
    """All requests come to a quarter of the Fronts, as where a proxy prefers those of its own node."""
    num_replicas, num_fronts, seconds = (16, 8, 2.0) if quick else (64, 32, 30.0)
    setup = Setup(shared(), num_replicas, num_fronts, busy_fronts=num_fronts // 4)
    for arm in RULES:
        yield play(setup, arm, _heavy(num_replicas, seconds), seconds)


def delays(quick: bool) -> Iterator[Row]:
    """Reports that take 0 to 10 s on their way."""
    num_replicas, seconds = (16, 2.0) if quick else (64, 30.0)
    trace = _heavy(num_replicas, seconds)
    for delay_s in (0.0, 1.0) if quick else (0.0, 0.3, 1.0, 3.0, 10.0):
        setup = Setup(shared(), num_replicas, 16, report_delay_s=delay_s)
        for arm in (PRODUCT, ALL, POWER_OF_TWO):
            yield {"delay_s": delay_s, **play(setup, arm, trace, seconds)}


def lengths(quick: bool) -> Iterator[Row]:
    """Requests that are all alike, log-normal, and heavy-tailed; the load is the same."""
    num_replicas, seconds = (16, 2.0) if quick else (64, 30.0)
    mixes: dict[str, MakeOne] = {
        "all alike": Coin(0.6, prompt=200, output=120),
        "log-normal": Coin(0.6, prompt=200, output=120, spread=1.0),
        "heavy-tailed": heavy_tailed,
    }
    for name, make_one in mixes.items():
        trace = _heavy(num_replicas, seconds, make_one=make_one)
        for arm in (PRODUCT, ALL, POWER_OF_TWO):
            yield {"lengths": name, **play(Setup(shared(), num_replicas, 16), arm, trace, seconds)}


def faults(quick: bool) -> Iterator[Row]:
    """A replica that becomes slow, one that dies and is replaced, and cards of which half have half the speed."""
    num_replicas, seconds = (8, 4.0) if quick else (16, 80.0)
    half, fifth = seconds / 2, seconds / 5
    slow = (Fault(fifth, 0, "speed", 0.2), Fault(2 * half - fifth, 0, "speed", 1.0))
    dies = tuple(Fault(fifth * number, number, "die", seconds / 4) for number in (1, 2, 3))
    cases: dict[str, tuple[MakeEngine, tuple[Fault, ...], float]] = {
        "nothing happens": (shared(), (), 1.0),
        "one becomes five times slower": (shared(), slow, 1.0),
        "three die, one after the other": (shared(), dies, 1.0),
        "half of them have half the speed": (shared(1.0, 0.5), (), 0.75),
    }
    for name, (make_engine, happen, capacity) in cases.items():
        trace = poisson(heavy_tailed, 1, seconds, 0.7 * capacity * num_replicas * TOKENS_PER_S)
        setup = Setup(make_engine, num_replicas, num_replicas // 2, faults=happen)
        for arm in RULES:
            yield {"case": name, **play(setup, arm, trace, seconds)}


EXPERIMENTS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "sizes": sizes,
    "looked_at": looked_at,
    "fronts": fronts,
    "uneven_fronts": uneven_fronts,
    "delays": delays,
    "lengths": lengths,
    "faults": faults,
}
