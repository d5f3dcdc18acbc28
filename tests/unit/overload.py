"""A pool of simulated engines behind an admission or none: events in order, no wall clock. For tests of what it promises.

An engine computes `tokens_per_s`, one request after the other, each request a random factor slower or faster than that.
Clients arrive by a Poisson process; a share of those refused come back when they were told.
"""

import heapq
import itertools
import random
from dataclasses import dataclass, field

from orthrus_serve.policy.admission import Admission, Asked, Backlog, Goals, Measure, Predicted, Refused
from orthrus_serve.policy.service_rate import Done, ServiceRate
from orthrus_serve.types import Priority, RequestKind

HEADROOM: dict[Priority, float] = {"high": 0.9, "normal": 0.8, "low": 0.6}
REPORT_GAP_S = 0.1


@dataclass
class Client:
    """One request and what became of it."""

    arrived_s: float
    kind: RequestKind
    num_prompt: int
    num_output: int
    goals: Goals
    priority: Priority
    number: int
    tries: list[float] = field(default_factory=list)  # when it asked
    refused: list[Refused] = field(default_factory=list)
    predicted: Predicted = field(default_factory=Predicted)
    admitted_s: float | None = None
    first_token_s: float | None = None
    done_s: float | None = None

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_output

    def asked(self) -> Asked:
        num_outputs = 0 if self.kind == "embed" else 1
        return Asked(self.kind, self.num_tokens, self.num_output, num_outputs, self.goals, self.priority, self.number)

    @property
    def is_good(self) -> bool:
        if self.admitted_s is None or self.done_s is None or self.first_token_s is None:
            return False
        ttft_s, e2e_s = self.first_token_s - self.admitted_s, self.done_s - self.admitted_s
        return (self.goals.ttft_s is None or ttft_s <= self.goals.ttft_s) and (
            self.goals.e2e_s is None or e2e_s <= self.goals.e2e_s
        )


@dataclass
class Engine:
    """First come, first served."""

    tokens_per_s: float
    free_s: float = 0.0
    queue: list[tuple[float, float, int]] = field(default_factory=list)  # start, end, tokens
    num_done: int = 0
    busy_s: float = 0.0

    def left(self, now_s: float) -> tuple[int, int]:
        """Tokens left, and requests open."""
        self.settle(now_s)
        left = sum(
            num_tokens if now_s < start_s else int(num_tokens * (end_s - now_s) / (end_s - start_s))
            for start_s, end_s, num_tokens in self.queue
        )
        return left, len(self.queue)

    def settle(self, now_s: float) -> None:
        while self.queue and self.queue[0][1] <= now_s:
            start_s, end_s, num_tokens = self.queue.pop(0)
            self.num_done += num_tokens
            self.busy_s += end_s - start_s


@dataclass
class Pool:
    """Engines, an admission or none, and reports that come every 100 ms."""

    engines: list[Engine]
    admission: Admission | None
    rng: random.Random
    noise: float = 0.1
    rates: list[ServiceRate] = field(default_factory=list[ServiceRate])
    next_report_s: float = 0.0

    def run(self, clients: list[Client], share_returning: float = 0.0, max_tries: int = 6) -> None:
        order = itertools.count()
        events: list[tuple[float, int, Client, Measure | None]] = [(c.arrived_s, next(order), c, None) for c in clients]
        self.rates = [ServiceRate() for _ in self.engines]
        heapq.heapify(events)
        while events:
            now_s, _, client, reached = heapq.heappop(events)
            self._report(now_s)
            if reached is not None:
                self._learn(client, reached, now_s)
                continue
            wait_s = self._ask(client, now_s)
            if client.done_s is not None and client.first_token_s is not None:
                heapq.heappush(events, (client.first_token_s, next(order), client, "ttft"))
                heapq.heappush(events, (client.done_s, next(order), client, "e2e"))
            elif wait_s is not None and len(client.tries) < max_tries and self.rng.random() < share_returning:
                heapq.heappush(events, (now_s + wait_s, next(order), client, None))

    def _ask(self, client: Client, now_s: float) -> float | None:
        """Admits, or returns when to come back."""
        client.tries.append(now_s)
        number, engine = min(enumerate(self.engines), key=lambda pair: pair[1].left(now_s)[0])
        if self.admission is not None:
            backlog = Backlog(*engine.left(now_s), self.rates[number].rate, len(self.engines))
            decided = self.admission.decide(client.asked(), backlog, now_s)
            if isinstance(decided, Refused):
                client.refused.append(decided)
                return decided.retry_after_s
            client.predicted = decided
        client.admitted_s, start_s = now_s, max(now_s, engine.free_s)
        slow = self.rng.lognormvariate(0.0, self.noise)
        engine.free_s = client.done_s = start_s + client.num_tokens / engine.tokens_per_s * slow
        client.first_token_s = start_s + client.num_prompt / engine.tokens_per_s * slow
        engine.queue.append((start_s, client.done_s, client.num_tokens))
        return None

    def _learn(self, client: Client, reached: Measure, now_s: float) -> None:
        predicted_s = client.predicted.of(reached)
        if self.admission is not None and predicted_s is not None and client.admitted_s is not None:
            self.admission.learn(client.kind, reached, predicted_s, now_s - client.admitted_s, now_s)

    def _report(self, now_s: float) -> None:
        if now_s < self.next_report_s:
            return
        self.next_report_s = now_s + REPORT_GAP_S
        for engine, rate in zip(self.engines, self.rates, strict=True):
            engine.settle(now_s)
            rate.see(Done({"generate": engine.num_done}, engine.num_done, engine.busy_s))


def make_clients(
    rng: random.Random,
    seconds: float,
    tokens_per_s: float,
    goals: dict[RequestKind, Goals],
    priorities: tuple[Priority, ...] = ("normal",),
) -> list[Client]:
    """Half embeddings, half generations with heavy-tailed lengths, offering so many tokens a second."""
    clients: list[Client] = []
    at_s = 0.0
    while at_s < seconds:
        kind: RequestKind = "embed" if rng.random() < 0.5 else "generate"
        prompt = min(1000, 20 + int(rng.lognormvariate(4.0, 0.7)))
        output = 0 if kind == "embed" else min(400, int(30 * rng.paretovariate(1.5)))
        clients.append(Client(at_s, kind, prompt, output, goals[kind], rng.choice(priorities), len(clients)))
        at_s += rng.expovariate(1.0) * (prompt + output) / tokens_per_s
    return clients
