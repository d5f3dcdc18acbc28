"""Who is let in, in virtual time: a Front's admission to its pool, by the product's own decision, rates and calibration.

Adapter of `policy/admission.py` as `serving/admission.py` is one for HTTP. Leaves out limits of keys, priorities, clients that
come back when told (`tests/unit/overload.py` has them), and times to a first token, which these engines do not tell.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from orthrus_serve.policy.admission import Admission, Asked, Goals, Predicted, Refused
from orthrus_serve.policy.routed_request import RoutedRequest
from orthrus_serve.policy.service_rate import PoolRates
from orthrus_serve.serving.engine_reports import ReplicaReport
from orthrus_serve.serving.router_state import RouterState
from orthrus_serve.types import ReplicaId, RequestKind

# Of newcomers of normal priority, as a Serve file has it by default.
HEADROOM = 0.8


@dataclass(frozen=True)
class AdmissionSetup:
    """Within what time requests of each kind are to be complete, in s, and the share of that which is planned for."""

    goals_s: Mapping[RequestKind, float]
    headroom: float = HEADROOM


@dataclass
class Gate:
    """The admission of one Front."""

    setup: AdmissionSetup
    state: RouterState
    rates: PoolRates = field(default_factory=PoolRates)

    def __post_init__(self) -> None:
        self._admission = Admission(dict.fromkeys(("high", "normal", "low"), self.setup.headroom))

    def decide(self, routed: RoutedRequest, kind: RequestKind, now_s: float) -> Predicted | Refused:
        """Lets a request in, or refuses it. Who is let in must be charged before anybody else asks."""
        asked = Asked(
            kind=kind,
            num_tokens=routed.charge,
            num_output=routed.expected_output,
            num_outputs=int(kind == "generate"),
            goals=Goals(e2e_s=self.setup.goals_s[kind]),
            fingerprint=hash(routed.request_id),
        )
        backlog = self.state.backlog(kind, asked.num_tokens, self.rates)
        return Predicted() if backlog is None else self._admission.decide(asked, backlog, now_s)

    def take_report(self, report: ReplicaReport) -> None:
        """An engine's own counts."""
        self.rates.see(ReplicaId(report.replica), report.done)

    def learn(self, kind: RequestKind, predicted: Predicted, took_s: float, now_s: float) -> None:
        """A request that was let in is answered."""
        if predicted.e2e_s is not None:
            self._admission.learn(kind, "e2e", predicted.e2e_s, took_s, now_s)
