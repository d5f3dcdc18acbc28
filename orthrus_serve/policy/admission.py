"""Admits a request when it will probably meet its goal, and else says when one like it would. Pure; the clock is an argument.

    predicted TTFT = (tokens ahead + own prompt) / tokens a second        on the replica that the router would choose
    predicted E2E  = predicted TTFT + expected output × time of a step
    admit            when factor × predicted <= goal × headroom           for both, where there is a goal

The factor is learnt from how recent requests with a similar prediction really went (`calibration.py`), so that of those that
are admitted 99 in 100 keep their goal. Headroom belongs to the priority: while the backlog grows, low is refused first. Who was
refused and comes back when told has a little more of it than newcomers (`promises.py`).
Guards: an idle replica takes any request that could meet its goal alone, so nothing that was learnt can shut a pool for good.
Leaves out limits of one client (`key_limits.py`), who measures loads and rates, and HTTP.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from orthrus_serve.policy.calibration import Calibration
from orthrus_serve.policy.promises import Promises
from orthrus_serve.policy.service_rate import Rate
from orthrus_serve.types import Priority, RequestKind

Measure = Literal["ttft", "e2e"]
Reason = Literal["saturated", "warming_up", "goal_unreachable"]
# Highest first.
PRIORITIES: tuple[Priority, ...] = get_args(Priority)
MEASURES: tuple[Measure, ...] = ("ttft", "e2e")

# Before any rate is known, a replica gets so many requests at a time.
MAX_OPEN_WITHOUT_RATE = 8
WARM_UP_RETRY_S = 1.0
# So much of the goal is left to those who come back, above the headroom of newcomers of their priority.
RETURN_HEADROOM = 0.1
# Over about what time it is counted how admitted work is shared by priority, and the least that is taken to be left over.
SHARES_MEMORY_S = 5.0
LEAST_SHARE = 0.02


@dataclass(frozen=True)
class Goals:
    """Within what time a request is to have its first token, and to be complete; None is no goal."""

    ttft_s: float | None = None
    e2e_s: float | None = None

    def of(self, measure: Measure) -> float | None:
        """The goal of one measure."""
        return self.ttft_s if measure == "ttft" else self.e2e_s


@dataclass(frozen=True)
class Asked:
    """A request that wants in.

    Attributes:
        num_tokens: its whole charge; what it adds to a load.
        num_output: tokens expected of each output; 0 for an embedding.
        num_outputs: outputs, which are made side by side.
        fingerprint: by which it is known when it comes back after a refusal.
    """

    kind: RequestKind
    num_tokens: int
    num_output: int
    num_outputs: int
    goals: Goals
    priority: Priority = "normal"
    fingerprint: int = 0


@dataclass(frozen=True)
class Backlog:
    """What is known of the replica that the router would choose, and of its pool.

    Attributes:
        num_tokens: remaining tokens there, everyone's.
        num_open: requests open there, everyone's.
        rate: of that replica; None while nobody's is known.
        num_replicas: replicas that serve the kind.
    """

    num_tokens: int
    num_open: int
    rate: Rate | None
    num_replicas: int = 1


@dataclass(frozen=True)
class Predicted:
    """Times predicted for an admitted request, not multiplied by any factor; None while no rate is known."""

    ttft_s: float | None = None
    e2e_s: float | None = None

    def of(self, measure: Measure) -> float | None:
        """The prediction of one measure."""
        return self.ttft_s if measure == "ttft" else self.e2e_s


@dataclass(frozen=True)
class Refused:
    """Why, and when to come back; `retry_after_s` None: it makes no sense to."""

    reason: Reason
    retry_after_s: float | None


def predict(asked: Asked, num_ahead: int, rate: Rate) -> Predicted:
    """What to expect behind `num_ahead` tokens."""
    num_prompt = max(0, asked.num_tokens - asked.num_output * asked.num_outputs)
    ttft_s = (num_ahead + num_prompt) / rate.tokens_per_s
    return Predicted(ttft_s, ttft_s + asked.num_output * max(rate.step_s, 1.0 / rate.tokens_per_s))


@dataclass
class Admission:
    """The admission to one pool, as one Front decides it. One event loop owns it."""

    headroom: Mapping[Priority, float]
    promises: Mapping[Priority, Promises] = field(
        default_factory=lambda: {priority: Promises() for priority in PRIORITIES}
    )
    _shares: dict[Priority, float] = field(default_factory=lambda: dict.fromkeys(PRIORITIES, 0.0))
    _calibrations: dict[tuple[RequestKind, Measure], Calibration] = field(
        default_factory=dict[tuple[RequestKind, Measure], Calibration]
    )

    def decide(self, asked: Asked, backlog: Backlog, now_s: float) -> Predicted | Refused:
        """Admits, with what was predicted, or refuses."""
        if asked.goals == Goals():
            return Predicted() if backlog.rate is None else predict(asked, backlog.num_tokens, backlog.rate)
        if backlog.rate is None:
            if backlog.num_open < MAX_OPEN_WITHOUT_RATE:
                return Predicted()
            return Refused("warming_up", WARM_UP_RETRY_S)
        alone = predict(asked, 0, backlog.rate)
        if any(alone_s > goal_s for alone_s, goal_s in _with_goals(asked.goals, alone).values()):
            return Refused("goal_unreachable", None)
        predicted = predict(asked, backlog.num_tokens, backlog.rate)
        promises = self.promises[asked.priority]
        returns = promises.is_due(asked.fingerprint, now_s)
        headroom = min(1.0, self.headroom[asked.priority] + (RETURN_HEADROOM if returns else 0.0))
        drain_s = self._drain_s(asked, predicted, headroom, now_s)
        pool_rate = backlog.rate.tokens_per_s * backlog.num_replicas
        if drain_s <= 0 or backlog.num_open == 0:
            promises.redeem(asked.fingerprint)
            self._admitted(asked, pool_rate)
            return predicted
        drain_s = min(drain_s, backlog.num_tokens / backlog.rate.tokens_per_s)  # an idle replica takes it
        wait_s = self._wait_s(asked.priority, drain_s, pool_rate)
        return Refused("saturated", promises.promise(asked.fingerprint, asked.num_tokens, wait_s, now_s))

    def learn(self, kind: RequestKind, measure: Measure, predicted_s: float, actual_s: float, now_s: float) -> None:
        """An admitted request reached its first token, or its end."""
        self._calibration(kind, measure).observe(predicted_s, actual_s, now_s)

    def factor(self, kind: RequestKind, measure: Measure, predicted_s: float, now_s: float) -> float:
        """By what a prediction is multiplied."""
        return self._calibration(kind, measure).factor(predicted_s, now_s)

    def _wait_s(self, priority: Priority, drain_s: float, pool_rate: float) -> float:
        """When there is room for a request of this priority: behind those who were told before it, and beside newcomers of a
        higher priority, who take what they took of late."""
        higher = PRIORITIES[: PRIORITIES.index(priority)]
        left_over = max(LEAST_SHARE, 1.0 - sum(self._shares[other] for other in higher))
        promised = sum(self.promises[other].expected_tokens for other in (*higher, priority))
        return (drain_s + promised / pool_rate) / left_over

    def _admitted(self, asked: Asked, pool_rate: float) -> None:
        kept = math.exp(-asked.num_tokens / (pool_rate * SHARES_MEMORY_S))
        for priority in PRIORITIES:
            self._shares[priority] *= kept
        self._shares[asked.priority] += 1.0 - kept

    def _drain_s(self, asked: Asked, predicted: Predicted, headroom: float, now_s: float) -> float:
        """How long the backlog must shrink before the request fits; 0 or less when it does."""
        return max(
            predicted_s - goal_s * headroom / max(self.factor(asked.kind, measure, predicted_s, now_s), 1e-6)
            for measure, (predicted_s, goal_s) in _with_goals(asked.goals, predicted).items()
        )

    def _calibration(self, kind: RequestKind, measure: Measure) -> Calibration:
        return self._calibrations.setdefault((kind, measure), Calibration())


def _with_goals(goals: Goals, predicted: Predicted) -> dict[Measure, tuple[float, float]]:
    """Prediction and goal of every measure that has both."""
    both: dict[Measure, tuple[float, float]] = {}
    for measure in MEASURES:
        predicted_s, goal_s = predicted.of(measure), goals.of(measure)
        if predicted_s is not None and goal_s is not None:
            both[measure] = (predicted_s, goal_s)
    return both
