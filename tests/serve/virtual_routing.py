"""The router's rules in virtual time: the product's own router state, charges and reports, with engines and clock computed.

No process, no network, no noise: the same seed gives the same numbers on any machine. Two kinds of engine of the same speed:
`serial` computes one request after the other, `shared` all that it has at once, each at the same speed. Used by
`routing_rules.py`, which has the same rules on a real Ray.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from orthrus_serve.policy.charge import ChargeEstimator, RequestShape
from orthrus_serve.policy.routed_request import RoutedRequest
from orthrus_serve.serving.engine_reports import REPORT_GAP_S, OpenCall, OpenCalls, ReplicaReport
from orthrus_serve.serving.router_state import RouterState
from orthrus_serve.types import ReplicaId, RequestKind, RouterRule

EngineKind = Literal["serial", "shared"]
HOP_S = 0.003  # from a Front to a replica, and for a report back


@dataclass(frozen=True)
class Arrival:
    """A request of a trace. `num_output` is known to the engine only; clients allow `max_tokens`."""

    at_s: float
    kind: RequestKind
    num_prompt: int
    num_output: int

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_output


@dataclass
class Running:
    """A request inside an engine."""

    arrival: Arrival
    front: int
    request_id: str
    call: OpenCall
    num_done: float = 0.0

    @property
    def num_left(self) -> float:
        return self.arrival.num_tokens - self.num_done


@dataclass
class VirtualEngine:
    """One engine with what its replica knows of its calls."""

    kind: EngineKind
    tokens_per_s: float
    replica: ReplicaId
    running: list[Running] = field(default_factory=list)
    calls: OpenCalls = field(default_factory=OpenCalls)
    now_s: float = 0.0
    num_computed: float = 0.0
    num_reports: int = 0
    last_report: ReplicaReport | None = None

    def _served(self) -> list[Running]:
        return self.running[:1] if self.kind == "serial" else self.running

    def next_end_s(self) -> float:
        served = self._served()
        if not served:
            return float("inf")
        return self.now_s + min(request.num_left for request in served) * len(served) / self.tokens_per_s

    def advance(self, to_s: float) -> None:
        """Computes until then; nothing may end before."""
        served = self._served()
        for request in served:
            part = min(request.num_left, (to_s - self.now_s) * self.tokens_per_s / len(served))
            request.num_done += part
            self.num_computed += part
        self.now_s = to_s

    def end_first(self, at_s: float) -> Running:
        """Computes until the next request ends, which is then, and takes it out."""
        self.advance(at_s)
        ended = min(self._served(), key=lambda request: request.num_left)
        self.num_computed += ended.num_left  # what rounding has left
        self.running.remove(ended)
        self.calls.end(ended.call)
        return ended

    def report(self, max_tokens: int) -> ReplicaReport | None:
        """What the replica would tell the Fronts now, if it is news."""
        facts = {}
        for request in self.running:
            made = max(0, int(request.num_done) - request.arrival.num_prompt)
            most = max_tokens if request.arrival.kind == "generate" else 0
            facts[request.request_id] = (0, max(0, request.arrival.num_prompt - int(request.num_done)), made, most)
        self.calls.follow(facts, self.calls.mark)
        report = ReplicaReport(str(self.replica), self.calls.by_front())
        if report == self.last_report:
            return None
        self.last_report = report
        self.num_reports += 1
        return ReplicaReport(report.replica, report.calls, number=self.num_reports)


@dataclass(frozen=True)
class Played:
    """Latencies in s in order of arrival, and the tokens that each engine computed."""

    latency_s: list[float]
    by_engine: list[float]


@dataclass(frozen=True)
class VirtualSetup:
    """What a trace is played on. `has_reports` False: every Front knows only what it has charged and settled itself."""

    engine: EngineKind
    num_engines: int
    num_fronts: int
    tokens_per_s: float
    max_tokens: int
    has_reports: bool = True


class VirtualRun:
    """One trace under one rule. Events that are known to come are in a heap; ends of requests follow from the engines."""

    def __init__(self, setup: VirtualSetup, rule: RouterRule, seed: int) -> None:
        self._setup = setup
        self._rng = random.Random(seed)
        self._replicas = [ReplicaId(f"r{number}") for number in range(setup.num_engines)]
        self._engines = {name: VirtualEngine(setup.engine, setup.tokens_per_s, name) for name in self._replicas}
        self._fronts = [
            RouterState(rule=rule, replicas=tuple(self._replicas), rng=random.Random(seed + number))
            for number in range(setup.num_fronts)
        ]
        self._estimators = [ChargeEstimator() for _ in self._fronts]
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_events = 0
        self._latencies: dict[str, float] = {}

    def play(self, trace: Sequence[Arrival]) -> Played:
        """Until every request is answered and settled."""
        for number, arrival in enumerate(trace):
            self._later(arrival.at_s, self._arrive, str(number), arrival)
        if self._setup.has_reports:
            for replica in self._replicas:
                self._later(self._rng.uniform(0, REPORT_GAP_S), self._report, replica)
        while len(self._latencies) < len(trace):
            end_s, first = min((engine.next_end_s(), replica) for replica, engine in self._engines.items())
            if not self._events or end_s <= self._events[0][0]:
                self._end(end_s, self._engines[first])
            else:
                now_s, _, happen, details = heapq.heappop(self._events)
                happen(now_s, *details)
        assert all(state.ledger.num_open == state.ledger.num_own_tokens == 0 for state in self._fronts)
        latencies = [self._latencies[str(number)] for number in range(len(trace))]
        return Played(latencies, [engine.num_computed for engine in self._engines.values()])

    def _later(self, at_s: float, happen: Callable[..., None], *details: Any) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at_s, self._num_events, happen, details))

    def _arrive(self, now_s: float, request_id: str, arrival: Arrival) -> None:
        front = self._rng.randrange(len(self._fronts))
        shape = RequestShape(
            arrival.kind,
            body_bytes=0,
            num_prompt_ids=arrival.num_prompt,
            num_outputs=int(arrival.kind == "generate"),
            max_tokens=self._setup.max_tokens,
        )
        estimator = self._estimators[front]
        routed = RoutedRequest(request_id, arrival.kind, estimator.estimate(shape), estimator.expected_output(shape))
        chosen = self._fronts[front].choose_and_charge(routed, self._replicas)
        self._later(now_s + HOP_S, self._begin, self._engines[chosen], front, routed, arrival)

    def _begin(self, now_s: float, engine: VirtualEngine, front: int, routed: RoutedRequest, arrival: Arrival) -> None:
        engine.advance(now_s)
        call = engine.calls.begin(f"f{front}", routed.request_id, routed.charge, routed.expected_output)
        engine.calls.note(call, routed.request_id)
        engine.running.append(Running(arrival, front, routed.request_id, call))

    def _end(self, now_s: float, engine: VirtualEngine) -> None:
        self._later(now_s + HOP_S, self._settle, engine.replica, engine.end_first(now_s))

    def _settle(self, now_s: float, replica: ReplicaId, request: Running) -> None:
        self._fronts[request.front].settle(request.request_id, replica)
        if request.arrival.num_output:
            self._estimators[request.front].learn_output(request.arrival.num_output)
        self._latencies[request.request_id] = now_s - request.arrival.at_s

    def _report(self, now_s: float, replica: ReplicaId) -> None:
        engine = self._engines[replica]
        engine.advance(now_s)
        report = engine.report(self._setup.max_tokens)
        if report is not None:
            self._later(now_s + HOP_S, self._take, report)
        self._later(now_s + REPORT_GAP_S, self._report, replica)

    def _take(self, _now_s: float, report: ReplicaReport) -> None:
        for number, state in enumerate(self._fronts):
            state.follow(f"f{number}", report)
