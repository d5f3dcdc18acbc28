"""Fronts, replicas and what passes between them, in virtual time: the product's own router state, charges and reports.

No process, no network, no noise: the same seed gives the same numbers on any machine. Guards: every request is answered
exactly once, or refused at once, also when its replica dies under it; at the end no Front holds a charge. Leaves out HTTP, Ray
and what they cost (one fixed time each way). Who is let in: `gate.py`.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from orthrus_serve.policy.admission import Predicted, Refused
from orthrus_serve.policy.charge import ChargeEstimator, RequestShape
from orthrus_serve.policy.replica_choice import Place
from orthrus_serve.policy.roles import Split
from orthrus_serve.policy.routed_request import RoutedRequest
from orthrus_serve.policy.service_rate import Done
from orthrus_serve.serving.engine_reports import OpenCall, OpenCalls, ReplicaReport, report_gap_s
from orthrus_serve.serving.router_state import RouterState
from orthrus_serve.sim.engines import Ended, Job, VirtualEngine, facts_of
from orthrus_serve.sim.events import Agenda
from orthrus_serve.sim.gate import AdmissionSetup, Gate
from orthrus_serve.sim.workload import Arrival
from orthrus_serve.types import ReplicaId, RequestKind, RouterRule

HOP_S = 0.003  # from a Front to a replica, and back


@dataclass(frozen=True)
class Fault:
    """Something happens to a replica.

    Attributes:
        number: which one, from 0; a replica that took the place of a dead one has its number.
        what: `speed`: it computes `value` times as fast as it was made to. `die`: it loses what it holds, and another takes
            its place after `value` seconds.
    """

    at_s: float
    number: int
    what: Literal["speed", "die"]
    value: float


MakeEngine = Callable[[Agenda, Ended, int], VirtualEngine]


@dataclass(frozen=True)
class Setup:
    """What a trace is played on.

    Attributes:
        make_engine: makes the engine of the replica with that number.
        max_tokens: what clients allow an output.
        max_tokens: what clients allow an output; None is just what it will be.
        has_reports: False: every Front knows only what it has charged and settled itself.
        busy_fronts: how many of the Fronts get requests; None is all of them.
        report_gap_s: between two reports of a replica; None is the product's own for so many replicas.
        report_delay_s: how long a report takes besides the way.
        make_state: what each Front chooses by; the study tries others.
        admission: None lets everybody in.
    """

    make_engine: MakeEngine
    num_engines: int
    num_fronts: int = 2
    rule: RouterRule = "least_remaining_tokens"
    split: Split | None = None
    max_tokens: int | None = 2000
    busy_fronts: int | None = None
    has_reports: bool = True
    report_gap_s: float | None = None
    report_delay_s: float = 0.0
    faults: tuple[Fault, ...] = ()
    make_state: Callable[..., RouterState] = RouterState
    admission: AdmissionSetup | None = None


@dataclass(frozen=True)
class Answer:
    """One answered request. `since_s` is when the first request of its chain arrived."""

    kind: RequestKind
    at_s: float
    latency_s: float
    is_last: bool
    since_s: float

    @property
    def chain_s(self) -> float:
        """From the arrival of the chain's first request to the end of this one."""
        return self.at_s + self.latency_s - self.since_s


@dataclass(frozen=True)
class Played:
    """What came of a trace.

    Attributes:
        latency_s: in s, in order of the trace; of a chain, until its last answer.
        by_engine: tokens that each engine computed, by number; of the one there now, where one died.
        answers: every answered request, also within chains, in order of their ends.
        num_retried: requests that were sent again because their replica died.
        refused: kind and time of arrival of those that were not let in; no chain goes on after one.
    """

    latency_s: list[float]
    by_engine: list[float]
    answers: list[Answer]
    num_retried: int
    refused: list[tuple[RequestKind, float]] = field(default_factory=list[tuple[RequestKind, float]])


@dataclass(eq=False)
class _Asked:
    """A request on its way."""

    request_id: str
    arrival: Arrival
    at_s: float
    root: int
    since_s: float
    front: int
    routed: RoutedRequest
    predicted: Predicted = field(default_factory=Predicted)


@dataclass(eq=False)
class _Replica:
    """One replica: its engine, and what it knows of its calls."""

    replica_id: ReplicaId
    number: int
    calls: OpenCalls = field(default_factory=OpenCalls)
    open: dict[str, tuple[_Asked, OpenCall]] = field(default_factory=dict)
    engine: VirtualEngine | None = None
    is_alive: bool = True
    next_report_s: float = 0.0
    is_report_due: bool = False
    num_reports: int = 0
    last_report: ReplicaReport | None = None


class Cluster:
    """One trace on one setup."""

    def __init__(self, setup: Setup, seed: int) -> None:
        self._setup = setup
        self._rng = random.Random(seed)
        self._agenda = Agenda()
        self._gap_s = report_gap_s(setup.num_engines) if setup.report_gap_s is None else setup.report_gap_s
        self._num_made = 0
        self._replicas: list[_Replica] = []
        self._by_id: dict[ReplicaId, _Replica] = {}
        self._listed: list[ReplicaId] = []
        for number in range(setup.num_engines):
            self._replicas.append(self._start_replica(number))
        self._listed = [replica.replica_id for replica in self._replicas]
        self._fronts = [
            setup.make_state(
                rule=setup.rule,
                split=setup.split,
                place=Place(number, setup.num_fronts),
                rng=random.Random(seed * 1000 + number),
            )
            for number in range(setup.num_fronts)
        ]
        self._tell_fronts_who_runs()
        self._estimators = [ChargeEstimator() for _ in self._fronts]
        self._gates = [] if setup.admission is None else [Gate(setup.admission, state) for state in self._fronts]
        self._refused: list[tuple[RequestKind, float]] = []
        self._answers: list[Answer] = []
        self._ended_s: dict[int, float] = {}
        self._num_asked = 0
        self._num_retried = 0

    def play(self, trace: Sequence[Arrival]) -> Played:
        """Until every request, and all that follow, are answered and settled."""
        for fault in self._setup.faults:
            self._agenda.at(fault.at_s, self._strike, fault)
        if trace:
            self._agenda.at(trace[0].at_s, self._next_of, trace, 0)
        self._agenda.run(lambda: len(self._ended_s) == len(trace))
        left = [(state.ledger.num_open, state.ledger.num_own_tokens) for state in self._fronts]
        assert left == [(0, 0)] * len(left), left
        by_engine = [replica.engine.num_computed for replica in self._replicas if replica.engine is not None]
        latencies = [self._ended_s[number] - arrival.at_s for number, arrival in enumerate(trace)]
        return Played(latencies, by_engine, self._answers, self._num_retried, self._refused)

    # --- replicas -----------------------------------------------------------------------------------------------------

    def _start_replica(self, number: int) -> _Replica:
        replica = _Replica(ReplicaId(f"r{self._num_made:05d}"), number)
        self._num_made += 1
        # The first reports of all replicas must not come at one moment: no two started at one.
        replica.next_report_s = self._agenda.now_s + self._rng.random() * self._gap_s
        replica.engine = self._setup.make_engine(self._agenda, lambda job: self._end(replica, job), number)
        self._by_id[replica.replica_id] = replica
        return replica

    def _tell_fronts_who_runs(self) -> None:
        for state in self._fronts:
            state.replicas = tuple(self._listed)

    def _strike(self, fault: Fault) -> None:
        replica = self._replicas[fault.number]
        if fault.what == "speed":
            if replica.engine is not None:
                replica.engine.set_speed(fault.value)
            return
        replica.is_alive, replica.engine = False, None
        self._listed = [replica_id for replica_id in self._listed if replica_id != replica.replica_id]
        for state in self._fronts:
            state.forget(replica.replica_id)
        for asked, _ in list(replica.open.values()):
            self._agenda.after(HOP_S, self._ask_again, replica.replica_id, asked)
        replica.open.clear()
        self._agenda.after(fault.value, self._come_back, fault.number)

    def _come_back(self, number: int) -> None:
        self._replicas[number] = self._start_replica(number)
        self._listed = [*self._listed, self._replicas[number].replica_id]
        self._tell_fronts_who_runs()

    # --- requests -----------------------------------------------------------------------------------------------------

    def _next_of(self, trace: Sequence[Arrival], number: int) -> None:
        if number + 1 < len(trace):
            self._agenda.at(trace[number + 1].at_s, self._next_of, trace, number + 1)
        self._arrive(trace[number], number, trace[number].at_s)

    def _arrive(self, arrival: Arrival, root: int, since_s: float) -> None:
        front = self._rng.randrange(self._setup.busy_fronts or len(self._fronts))
        shape = RequestShape(
            arrival.kind,
            body_bytes=0,
            num_prompt_ids=arrival.num_prompt,
            num_outputs=int(arrival.kind == "generate"),
            max_tokens=arrival.num_output if self._setup.max_tokens is None else self._setup.max_tokens,
        )
        estimator = self._estimators[front]
        self._num_asked += 1
        request_id = str(self._num_asked)
        routed = RoutedRequest(request_id, arrival.kind, estimator.estimate(shape), estimator.expected_output(shape))
        asked = _Asked(request_id, arrival, self._agenda.now_s, root, since_s, front, routed)
        if self._gates:
            decided = self._gates[front].decide(routed, arrival.kind, self._agenda.now_s)
            if isinstance(decided, Refused):
                self._refused.append((arrival.kind, asked.at_s))
                self._ended_s[root] = asked.at_s
                return
            asked.predicted = decided
        self._send(asked)

    def _send(self, asked: _Asked) -> None:
        chosen = self._fronts[asked.front].choose_and_charge(asked.routed, self._listed)
        self._agenda.after(HOP_S, self._begin, self._by_id[chosen], asked)

    def _begin(self, replica: _Replica, asked: _Asked) -> None:
        if replica.engine is None:
            self._agenda.after(HOP_S, self._ask_again, replica.replica_id, asked)
            return
        routed = asked.routed
        call = replica.calls.begin(f"f{asked.front}", routed.request_id, routed.charge, routed.expected_output)
        replica.calls.note(call, routed.request_id)
        replica.open[routed.request_id] = (asked, call)
        replica.engine.add(Job(routed.request_id, asked.arrival))
        self._wake(replica)

    def _ask_again(self, lost: ReplicaId, asked: _Asked) -> None:
        """Its replica died. No byte was sent yet: nobody streams here."""
        self._num_retried += 1
        self._fronts[asked.front].settle(asked.request_id, lost)
        asked.routed = replace(asked.routed, avoid=(lost,))
        self._send(asked)

    def _end(self, replica: _Replica, job: Job) -> None:
        if not replica.is_alive:
            return
        asked, call = replica.open.pop(job.request_id)
        replica.calls.end(call)
        self._wake(replica)
        self._agenda.after(HOP_S, self._settle, replica.replica_id, asked)

    def _settle(self, replica_id: ReplicaId, asked: _Asked) -> None:
        self._fronts[asked.front].settle(asked.request_id, replica_id)
        arrival, now_s = asked.arrival, self._agenda.now_s
        if arrival.num_output:
            self._estimators[asked.front].learn_output(arrival.num_output)
        if self._gates:
            self._gates[asked.front].learn(arrival.kind, asked.predicted, now_s - asked.at_s, now_s)
        self._answers.append(Answer(arrival.kind, asked.at_s, now_s - asked.at_s, arrival.then is None, asked.since_s))
        if arrival.then is None:
            self._ended_s[asked.root] = now_s
        else:
            self._agenda.after(arrival.then.at_s, self._arrive, arrival.then, asked.root, asked.since_s)

    # --- reports ------------------------------------------------------------------------------------------------------

    def _wake(self, replica: _Replica) -> None:
        """There is news: it is told at once, or when the gap since the last report is over."""
        if self._setup.has_reports and not replica.is_report_due:
            replica.is_report_due = True
            self._agenda.at(replica.next_report_s, self._report, replica)

    def _report(self, replica: _Replica) -> None:
        replica.is_report_due = False
        if replica.engine is None:
            return
        replica.calls.follow(facts_of(replica.engine, self._setup.max_tokens), replica.calls.mark)
        report = ReplicaReport(str(replica.replica_id), replica.calls.by_front(), self._done(replica.engine))
        if report == replica.last_report:
            return
        replica.last_report = report
        replica.num_reports += 1
        replica.next_report_s = self._agenda.now_s + self._gap_s
        self._agenda.after(HOP_S + self._setup.report_delay_s, self._take, replace(report, number=replica.num_reports))
        if replica.open:
            self._wake(replica)  # what runs makes progress, which is news

    def _done(self, engine: VirtualEngine) -> Done:
        return engine.done() if self._gates else Done()  # only admission asks for it

    def _take(self, report: ReplicaReport) -> None:
        for gate in self._gates:
            gate.take_report(report)
        for number, state in enumerate(self._fronts):
            state.follow(f"f{number}", report)
