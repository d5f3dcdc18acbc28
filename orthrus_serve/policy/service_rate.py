"""How fast an engine computes tokens, from its own cumulative counts. Pure: counts come in, no clock.

An engine with little to do computes small steps and few tokens a second, which says nothing about what it could do. So each
span counts by the tokens computed in it, and what was learnt under load is forgotten by tokens, not by time. Leaves out who has
how much to do (the ledger) and how a rate becomes a prediction (`admission.py`).
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from orthrus_serve.types import ReplicaId, RequestKind

# Spans with less busy time than this are put together with the next: a step or two says little.
MIN_SPAN_S = 0.2
# What was learnt is half forgotten after about 0.7 times what the engine computes in this time at its full rate.
MEMORY_S = 5.0


@dataclass(frozen=True)
class Done:
    """What an engine has done since it started.

    Attributes:
        tokens: tokens computed, by kind.
        num_steps: forward passes.
        busy_s: time with a step running.
    """

    tokens: Mapping[RequestKind, int] = field(default_factory=dict[RequestKind, int])
    num_steps: int = 0
    busy_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens of both kinds."""
        return sum(self.tokens.values())


@dataclass(frozen=True)
class Rate:
    """Tokens a second of busy time, and how long a step takes: about the time per output token of one request."""

    tokens_per_s: float
    step_s: float


class ServiceRate:
    """The rate of one engine. `rate` is None until it was busy for a while."""

    def __init__(self) -> None:
        self._last = Done()
        self.rate: Rate | None = None

    def see(self, done: Done) -> None:
        """Take in the engine's counts. A report that is older than one seen before is ignored."""
        busy_s = done.busy_s - self._last.busy_s
        num_tokens = done.num_tokens - self._last.num_tokens
        num_steps = done.num_steps - self._last.num_steps
        if busy_s < MIN_SPAN_S or num_tokens < 1 or num_steps < 0:
            return
        self._last = done
        span = Rate(num_tokens / busy_s, busy_s / max(1, num_steps))
        if self.rate is None:
            self.rate = span
            return
        kept = math.exp(-num_tokens / (self.rate.tokens_per_s * MEMORY_S))
        # Steps are what they are now: a decode beside others takes as long as the step.
        kept_step = math.exp(-busy_s / MEMORY_S)
        self.rate = Rate(
            self.rate.tokens_per_s * kept + span.tokens_per_s * (1 - kept),
            self.rate.step_s * kept_step + span.step_s * (1 - kept_step),
        )


class PoolRates:
    """The rates of the engines of one pool. A new one is taken to be as fast as the others until it has shown its own."""

    def __init__(self) -> None:
        self._rates: dict[ReplicaId, ServiceRate] = {}

    def see(self, replica_id: ReplicaId, done: Done) -> None:
        """Take in the counts of one engine."""
        self._rates.setdefault(replica_id, ServiceRate()).see(done)

    def keep_only(self, replica_ids: Collection[ReplicaId]) -> None:
        """Forget everybody else: they are gone, and ids never come back."""
        for gone in set(self._rates).difference(replica_ids):
            del self._rates[gone]

    def of(self, replica_id: ReplicaId) -> Rate | None:
        """The rate of that engine; None while nobody's is known."""
        own = self._rates.get(replica_id)
        if own is not None and own.rate is not None:
            return own.rate
        known = [rate.rate for rate in self._rates.values() if rate.rate is not None]
        if not known:
            return None
        mean = sum(rate.tokens_per_s for rate in known) / len(known)
        return Rate(mean, sum(rate.step_s for rate in known) / len(known))
