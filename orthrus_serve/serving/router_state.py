"""What a Front process knows about the load of its engine replicas: one ledger per deployment, shared by the router and
the Front's metrics.

A module of its own because Serve pickles the *router's* module by value: globals beside the router class would be a copy per
deserialised class, while this module is imported. It is the one process-wide registry of the project; only the thread that
runs Serve's routers writes to it. Leaves out the arithmetic (`policy/ledger.py`) and the choice (`policy/replica_choice.py`).
"""

import asyncio
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from orthrus_serve.errors import OrthrusError
from orthrus_serve.policy.admission import Backlog
from orthrus_serve.policy.ledger import TokenLoadLedger
from orthrus_serve.policy.replica_choice import RULES, Measure, Place, choose_replica, home_of
from orthrus_serve.policy.roles import Split, replicas_serving
from orthrus_serve.policy.routed_request import RoutedRequest
from orthrus_serve.policy.service_rate import PoolRates
from orthrus_serve.serving.engine_reports import ReplicaReport
from orthrus_serve.types import Half, ReplicaId, RequestId, RequestKind, RouterRule

# A call that is given up before a replica was chosen for it would be remembered for ever.
MAX_CHOSEN = 100_000
# Lists of candidates that are kept: three kinds (none is one) and the halves of one, asked about by the router and by the
# Front's admission.
MAX_KEPT = 12


class NoReplicaError(OrthrusError):
    """No replica of the deployment came up within the time that a request waits for one, or not the one that it may go to."""


@dataclass(frozen=True)
class Candidates:
    """Who may be chosen, and which of them are at home; all alike where `home` is empty."""

    replicas: Sequence[ReplicaId]
    home: Sequence[ReplicaId] = ()


@dataclass(frozen=True)
class Likely:
    """The replica that a request would be given now, and what is ahead of it there.

    Attributes:
        num_tokens: remaining tokens of all requests there, and its share of those that are not placed yet.
        num_candidates: how many replicas serve the kind.
    """

    replica_id: ReplicaId
    num_tokens: int
    num_open: int
    num_candidates: int


@dataclass(frozen=True)
class Placed:
    """A replica that was chosen for a call, and when (monotonic clock)."""

    replica_id: ReplicaId
    at_s: float


@dataclass
class RouterState:
    """The ledger of one deployment, and what its rule needs besides.

    Four fields cross between threads, each written by one of them and replaced or popped in one step: the router's thread
    writes `replicas` and `chosen`, the Front's writes `quarantined` and `place`.

    Attributes:
        split: how many replicas have which role; None: each serves both kinds.
        place: this Front's among all Fronts, which gives it a home among the replicas; None: no home.
        replicas: those that Serve last listed as running, without any that died since.
        quarantined: replicas that are alive but cannot serve, and why.
        num_quarantines: how often a replica was put out.
        num_routed_to: requests that were sent to each running replica, by kind.
        chosen: the replica of each open call that somebody will ask about.
        coming: charges of calls that were opened and not placed yet. The Front's thread adds, the router's takes away.
        loop: where the router chooses; what it reads changes only there.
        kept: who may be chosen, by kind, half and list of replicas, and what that was worked out from. Either thread adds.
    """

    rule: RouterRule = "least_remaining_tokens"
    split: Split | None = None
    place: Place | None = None
    replicas: tuple[ReplicaId, ...] = ()
    ledger: TokenLoadLedger = field(default_factory=TokenLoadLedger)
    rng: random.Random = field(default_factory=random.Random)
    num_routed: int = 0
    last_turns: dict[ReplicaId, int] = field(default_factory=dict)
    quarantined: Mapping[ReplicaId, str] = field(default_factory=dict)
    num_quarantines: int = 0
    num_routed_to: Counter[tuple[ReplicaId, RequestKind]] = field(default_factory=Counter)
    clock: Callable[[], float] = time.monotonic
    chosen: OrderedDict[str, Placed] = field(default_factory=OrderedDict)
    report_numbers: dict[ReplicaId, int] = field(default_factory=dict)
    loop: asyncio.AbstractEventLoop | None = None
    coming: dict[str, int] = field(default_factory=dict)
    kept: dict[tuple[RequestKind | None, Half | None, int], tuple[tuple[object, ...], Candidates]] = field(
        default_factory=dict
    )

    def choose_and_charge(self, routed: RoutedRequest, replicas: Sequence[ReplicaId]) -> ReplicaId:
        """Chooses one of `replicas` and charges it. One synchronous step: nobody else chooses in between.

        Raises:
            NoReplicaError: the one replica that may be chosen is not among them.
        """
        chosen = self._choose(self._candidates(routed, replicas), routed.charge)
        self.num_routed += 1
        self.last_turns[chosen] = self.num_routed
        if routed.kind is not None:
            self.num_routed_to[chosen, routed.kind] += 1
        self.ledger.charge(_charge_id(routed.request_id, chosen), chosen, routed.charge)
        if routed.call_id is not None:
            self.coming.pop(routed.call_id, None)
            self.chosen[routed.call_id] = Placed(chosen, self.clock())
            if len(self.chosen) > MAX_CHOSEN:
                self.chosen.popitem(last=False)
        return chosen

    def likely(self, kind: RequestKind, num_tokens: int = 0) -> Likely | None:
        """Who would be chosen now for a request of so many tokens; charges nobody. None while no replica is known.

        May be called on any thread: it reads loads one by one, while they may change.
        """
        replicas = self.replicas
        if not replicas:
            return None
        candidates = self._candidates(RoutedRequest("", kind), replicas)
        chosen = self._choose(candidates, num_tokens)
        num_candidates = len(candidates.replicas)
        coming = list(self.coming.values())
        return Likely(
            chosen,
            self.ledger.load(chosen) + sum(coming) // num_candidates,
            self.ledger.open_requests.get(chosen, 0) + -(-len(coming) // num_candidates),
            num_candidates,
        )

    def backlog(self, kind: RequestKind, num_tokens: int, rates: PoolRates) -> Backlog | None:
        """What admission must know of where a request would go now. None while no replica is known; on any thread, as
        `likely`."""
        likely = self.likely(kind, num_tokens)
        if likely is None:
            return None
        return Backlog(likely.num_tokens, likely.num_open, rates.of(likely.replica_id), likely.num_candidates)

    def _choose(self, candidates: Candidates, num_tokens: int) -> ReplicaId:
        loads = self._loads(self.rule)
        return choose_replica(
            self.rule, candidates.replicas, loads, self.rng, home=candidates.home, num_tokens=num_tokens
        )

    def _candidates(self, routed: RoutedRequest, replicas: Sequence[ReplicaId]) -> Candidates:
        if routed.only is not None:
            if routed.only not in replicas:
                raise NoReplicaError(f"replica {routed.only} is not running")
            return Candidates([ReplicaId(routed.only)])
        if not routed.avoid:  # nearly always
            return self._usable(routed.kind, replicas, routed.stage)
        # Whatever would leave nobody is passed over: a request that may fail is better than one that certainly does.
        usable = _without(routed.avoid, _without(self.quarantined, replicas))
        # Roles are shared among those that can serve now: where the only one of a role just failed, another takes it over, as
        # it will for everybody once Serve lists the failed one no more.
        return Candidates(self.serving(routed.kind, usable, routed.stage))

    def _usable(self, kind: RequestKind | None, replicas: Sequence[ReplicaId], stage: Half | None = None) -> Candidates:
        """Those that serve the kind and are not in quarantine. Worked out once for as long as these are the same objects: there
        may be many replicas, and none of the four is ever changed, only replaced."""
        made_from = (replicas, self.quarantined, self.split, self.place)
        kept = self.kept.get((kind, stage, id(replicas)))
        if kept is None or any(old is not new for old, new in zip(kept[0], made_from, strict=True)):
            if len(self.kept) >= MAX_KEPT:
                self.kept.clear()
            usable = self.serving(kind, _without(self.quarantined, replicas), stage)
            kept = (made_from, Candidates(usable, () if self.place is None else home_of(usable, self.place)))
            self.kept[kind, stage, id(replicas)] = kept
        return kept[1]

    def serving(
        self, kind: RequestKind | None, replicas: Sequence[ReplicaId], stage: Half | None = None
    ) -> Sequence[ReplicaId]:
        """Those of `replicas` whose role it is to serve that kind, or that stage of it; all, when they have no roles or the
        request has no kind."""
        if self.split is None or kind is None:
            return replicas
        return replicas_serving(kind, replicas, self.split, stage)

    def _loads(self, rule: RouterRule) -> Mapping[ReplicaId, int]:
        by_measure: dict[Measure, Mapping[ReplicaId, int]] = {
            "remaining_tokens": self.ledger.remaining_tokens,
            "in_flight_tokens": self.ledger.in_flight_tokens,
            "open_requests": self.ledger.open_requests,
            "last_turn": self.last_turns,
        }
        return by_measure[RULES[rule].measure]

    def settle(self, request_id: str, replica_id: ReplicaId) -> None:
        """The request ended on that replica, however it ended. Unknown ones (broadcasts) are ignored."""
        self.ledger.settle(_charge_id(request_id, replica_id))

    def set_running(self, replica_ids: Collection[ReplicaId]) -> None:
        """Serve's list of running replicas changed. It leaves out those that stop or failed their health check and, for some
        tenths of a second, those that it is reconfiguring, which work on: what is charged to an absent one stays until it ends.

        Called on the router's event loop: reports are brought there.
        """
        self.loop = asyncio.get_running_loop()
        self.replicas = tuple(replica_ids)
        self.ledger.forget_absent(replica_ids)
        for memory in (self.last_turns, self.report_numbers):
            for gone in [replica for replica in memory if replica not in replica_ids]:
                del memory[gone]
        for key in [key for key in self.num_routed_to if key[0] not in replica_ids]:
            del self.num_routed_to[key]

    def forget(self, replica_id: ReplicaId) -> None:
        """The replica is gone."""
        self.replicas = tuple(replica for replica in self.replicas if replica != replica_id)
        self.ledger.forget(replica_id)
        self.last_turns.pop(replica_id, None)
        self.report_numbers.pop(replica_id, None)

    def take_report(self, front: str, report: ReplicaReport) -> None:
        """Brings a replica's report to the ledger. May be called on any thread."""
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self.follow, front, report)

    def follow(self, front: str, report: ReplicaReport) -> None:
        """Corrects the ledger, unless the report is late, or of a replica that is gone (it would never be forgotten again)."""
        replica_id = ReplicaId(report.replica)
        last_number = self.report_numbers.get(replica_id)
        if last_number is None:
            if replica_id not in self.replicas:  # a look through all of them, once for each replica
                return
        elif report.number <= last_number:
            return
        self.report_numbers[replica_id] = report.number
        own = {_charge_id(request_id, replica_id): num_tokens for request_id, num_tokens in report.own(front).items()}
        self.ledger.correct(replica_id, own, report.num_other_tokens(front), report.num_other_open(front))


def _without(excluded: Collection[str], replicas: Sequence[ReplicaId]) -> Sequence[ReplicaId]:
    if not excluded:  # nearly always; there may be many replicas
        return replicas
    return [replica for replica in replicas if replica not in excluded] or replicas


def _charge_id(request_id: str, replica_id: ReplicaId) -> RequestId:
    # All calls of one HTTP request carry one id. A retry may be charged before the end of the first try is reported.
    return RequestId(f"{request_id}@{replica_id}")


_STATES: dict[str, RouterState] = {}


def state_of(deployment: str) -> RouterState:
    """The state shared by everything in this process that routes to `deployment` (`application/name`)."""
    return _STATES.setdefault(deployment, RouterState())
