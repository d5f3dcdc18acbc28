"""The arms behind one Front: which answers a request, and what of that changes live.

An application without arms has one, with an empty name. Guards: a change holds whole from the next request on, or is refused
whole with its reason; nothing raises but the choice of an arm that does not exist. Leaves out the arithmetic of the choice
(`policy/arms.py`) and how one arm is routed (`live_routing.py`).
"""

import random
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orthrus_serve.config.arms import live_problems, routing_of, weights_of
from orthrus_serve.config.load import parse_live
from orthrus_serve.config.schema import AppArgs, FrontLiveSpec
from orthrus_serve.errors import ConfigError, RequestError
from orthrus_serve.policy.arms import Mirror, choose_arm, is_mirrored
from orthrus_serve.policy.charge import ChargeEstimator
from orthrus_serve.policy.replica_choice import Place
from orthrus_serve.policy.slices import SliceLog
from orthrus_serve.serving.admission import Door
from orthrus_serve.serving.asgi_io import header
from orthrus_serve.serving.engine_reports import ReplicaReport, report_gap_s
from orthrus_serve.serving.exchange import ARM_HEADER
from orthrus_serve.serving.live_routing import LiveRouting
from orthrus_serve.serving.pool import Pool
from orthrus_serve.serving.pool_keeper import PoolKeeper
from orthrus_serve.serving.router_state import RouterState
from orthrus_serve.serving.tunnel import Header
from orthrus_serve.telemetry.log import event_log
from orthrus_serve.types import TopologyName

log = event_log(__name__)


@dataclass(frozen=True)
class Arm:
    """One pool, and everything that a Front keeps of it."""

    name: str
    pool: Pool
    keeper: PoolKeeper
    estimator: ChargeEstimator
    state: RouterState
    routing: LiveRouting
    door: Door | None = None
    num_gpus_per_replica: float = 0.0

    @property
    def topology(self) -> TopologyName:
        """The topology in force."""
        return self.routing.topology

    def info(self) -> dict[str, Any]:
        """What is in force, and what is open. JSON-able."""
        ledger = self.state.ledger
        return {
            **self.routing.describe(),
            "place": None if self.state.place is None else [self.state.place.rank, self.state.place.num_fronts],
            "replicas": list(self.state.replicas),
            "routed": self.state.num_routed,
            "open": ledger.num_open,
            "tokens": ledger.num_own_tokens,
            "quarantined": dict(self.state.quarantined),
            "drift": ledger.num_drift_tokens,
            "loads": dict(ledger.remaining_tokens),
        }


class LiveArms:
    """All arms, their weights, and the mirror between two of them."""

    def __init__(self, args: AppArgs, arms: Iterable[Arm], rng: random.Random | None = None) -> None:
        """`args` are those of the application; there is an `Arm` for each of its `by_arm`."""
        self._args = args
        self._arms = {arm.name: arm for arm in arms}
        self._session_header = args.front.session_header.lower().encode()
        self._rng = rng or random.Random()
        self._weights = weights_of(args, FrontLiveSpec())
        self._mirror: Mirror | None = None
        self._refused: str | None = None
        self.slices = SliceLog(time.monotonic())

    def __iter__(self) -> Iterator[Arm]:
        return iter(self._arms.values())

    def take_report(self, front: str, report: ReplicaReport, place: Place) -> float:
        """Brings a replica's report to the arm that it is of, and this Front's place among all to every arm. Returns how many
        seconds the next report should be apart."""
        for arm in self:
            arm.state.place = place
            arm.state.take_report(front, report)  # an arm that the replica is not of ignores it
            if arm.door is not None and report.replica in arm.state.replicas:
                arm.door.take_report(report)
        return report_gap_s(sum(len(arm.state.replicas) for arm in self))

    @property
    def are_named(self) -> bool:
        """Whether there are arms at all, to choose from and to name to clients."""
        return bool(self._args.arms)

    @property
    def first(self) -> Arm:
        """The only one, where there are no arms."""
        return next(iter(self._arms.values()))

    def named(self, name: str) -> Arm | None:
        """The arm of that name."""
        return self._arms.get(name)

    def choose(self, headers: Iterable[Header]) -> Arm:
        """The arm that answers a request: the one that its header forces, else that of its session, else one by weight.

        Raises:
            RequestError: 400, there is no arm of that name.
        """
        if not self.are_named:
            return self.first
        forced = header(headers, ARM_HEADER)
        if forced is not None:
            name = forced.decode("latin-1").strip()
            if name not in self._arms:
                raise RequestError(
                    400,
                    f"X-Orthrus-Arm: there is no arm {name[:64]!r}; there are {', '.join(self._arms)}.",
                    code="unknown_arm",
                )
            return self._arms[name]
        session = header(headers, self._session_header) or b""
        return self._arms[choose_arm(self._weights, session.decode("latin-1"), self._rng.random())]

    def mirror_of(self, arm: Arm) -> Arm | None:
        """The arm that gets a copy of a request that `arm` answers; None for most."""
        mirror = self._mirror
        return self._arms[mirror.target] if mirror and is_mirrored(mirror, arm.name, self._rng.random()) else None

    def change(self, user_config: Any) -> None:
        """Follows the Front's `user_config` from the next request on. What it does not name is as `args` have it."""
        if not self.are_named:
            self.first.routing.change(user_config)
            return
        try:
            live = parse_live(user_config, ("user_config",), FrontLiveSpec)
            problems = live_problems(self._args, live, ("user_config",))
            if problems:
                raise ConfigError("\n".join(problems))
            topologies = {name: arm.routing.planned(routing_of(live, name)) for name, arm in self._arms.items()}
        except ConfigError as error:
            self._refuse(str(error))
            return
        before = self._compared()
        for name, topology in topologies.items():
            self._arms[name].routing.follow(topology)
        self._weights = weights_of(self._args, live)
        spec = live.mirror
        self._mirror = None if spec is None else Mirror(spec.source, spec.target, spec.share)
        self._refuse(None)
        if self._compared() != before:
            self.slices.restart(time.monotonic())

    def describe(self) -> dict[str, Any]:
        """Weights, mirror, and why the last change was refused, if it was. JSON-able."""
        mirror = self._mirror
        return {
            "weights": dict(self._weights),
            "mirror": mirror and {"from": mirror.source, "to": mirror.target, "share": mirror.share},
            "refused": self._refused,
        }

    def serving(self) -> Mapping[str, Any]:
        """By arm, which replicas serve a kind (`RouterState.serving`)."""
        return {name: arm.state.serving for name, arm in self._arms.items()}

    def _refuse(self, reason: str | None) -> None:
        self._refused = reason
        for arm in self._arms.values():
            arm.routing.refused = reason
        if reason is not None:
            log.error("reconfigure_refused", reason=reason)

    def _compared(self) -> tuple[Any, ...]:
        """What a comparison of arms is of: when it changes, what was measured before is of another one."""
        routing = {name: {**arm.routing.describe(), "refused": None} for name, arm in self._arms.items()}
        return routing, self._weights, self._mirror
