"""What one Front goes by, as it is changed live: topology, router rule, roles.

Guards: a change that cannot be is refused whole, with its reason, and nothing changes; nothing here raises, since Serve kills a
replica whose `reconfigure` does. Leaves out the engines' policy, which changes by their own `user_config`.
"""

from typing import Any

from orthrus_serve.config.arms import live_problems
from orthrus_serve.config.embedder import switch_problem
from orthrus_serve.config.load import parse_live
from orthrus_serve.config.schema import AppArgs, FrontLiveSpec, RoutingSpec
from orthrus_serve.errors import ConfigError
from orthrus_serve.policy.roles import Split
from orthrus_serve.policy.topology import Topology, expand
from orthrus_serve.serving.router_state import RouterState
from orthrus_serve.telemetry.log import event_log
from orthrus_serve.types import TopologyName

log = event_log(__name__)


class LiveRouting:
    """The routing of one Front to one pool; writes rule and roles to the state that its router chooses by.

    Attributes:
        refused: why the last change was refused, if it was.
    """

    def __init__(self, args: AppArgs, state: RouterState) -> None:
        """As `args` say: those of an application without arms, or of one arm. Raises ConfigError when they ask for what
        cannot be."""
        self._args = args
        self._state = state
        self.refused: str | None = None
        self.follow(self.planned(RoutingSpec()))

    @property
    def topology(self) -> TopologyName:
        """The topology in force."""
        return self._topology.name

    @property
    def hands_over(self) -> bool:
        """Whether a generation's prompt is computed by one replica and its answer by another."""
        return self._topology.hands_over

    def change(self, user_config: Any) -> None:
        """Follows the `user_config` of a Front without arms from the next choice on. What it does not name is as `args` have
        it."""
        try:
            live = parse_live(user_config, ("user_config",), FrontLiveSpec)
            problems = live_problems(self._args, live, ("user_config",))
            if problems:
                raise ConfigError("\n".join(problems))
            topology = self.planned(live)
        except ConfigError as error:
            self.refused = str(error)
            log.error("reconfigure_refused", reason=self.refused)  # noqa: TRY400 - a refusal, not a failure
            return
        self.refused = None
        self.follow(topology)

    def describe(self) -> dict[str, Any]:
        """What is in force, and why the last change was refused, if it was. JSON-able."""
        return {
            "topology": self._topology.name,
            "rule": self._topology.router_rule,
            **self._topology.ratios,
            "refused": self.refused,
        }

    def planned(self, live: RoutingSpec) -> Topology:
        """What would be in force. Raises ConfigError when it cannot be."""
        wanted = self._args.routed(live)
        problem = switch_problem(self._args.topology, wanted.topology or self._args.topology)
        if problem is not None:
            raise ConfigError(problem)
        return expand(
            wanted.topology or self._args.topology,
            num_replicas=self._args.num_replicas,
            split=None if wanted.ratio is None else Split(*wanted.ratio),
            router_rule=wanted.rule,
        )

    def follow(self, topology: Topology) -> None:
        """Puts a planned topology in force."""
        # Two plain assignments, seen by the router's thread one after the other: a choice in between is a choice by either.
        self._topology = topology
        self._state.rule, self._state.split = topology.router_rule, topology.split
