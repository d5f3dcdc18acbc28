"""One engine in steps under a closed loop, as the card was measured: so many clients, each with one request at a time.

Also says what an engine can compute of a given mix, by which the study scales its loads. Leaves out routing.
"""

import random
from dataclasses import dataclass

from orthrus_serve.sim.batching import BatchingEngine, BatchSpec
from orthrus_serve.sim.engines import Job
from orthrus_serve.sim.events import Agenda
from orthrus_serve.sim.summary import percentile
from orthrus_serve.sim.workload import Arrival, MakeOne
from orthrus_serve.types import RequestKind


@dataclass(frozen=True)
class Measured:
    """Of requests that ended in the window: latencies by kind in s, and tokens that the engine computed a second."""

    latency_s: dict[RequestKind, list[float]]
    tokens_per_s: float
    seconds: float

    def per_s(self, kind: RequestKind) -> float:
        """Requests of that kind a second."""
        return len(self.latency_s[kind]) / self.seconds

    def p99_s(self, kind: RequestKind) -> float:
        """99th percentile of that kind's latencies."""
        return percentile(self.latency_s[kind], 0.99)


class ClosedLoop:
    """Clients that send the next request when the last is answered; chains are sent link by link."""

    def __init__(self, spec: BatchSpec, make_one: MakeOne, num_clients: int, seed: int = 0) -> None:
        self._agenda = Agenda()
        self._make_one = make_one
        self._rngs = [random.Random(seed * 7919 + client) for client in range(num_clients)]
        self._engine = BatchingEngine(self._agenda, spec, self._end)
        self._sent: dict[Job, tuple[int, float]] = {}
        self._ended: list[tuple[float, RequestKind, float]] = []
        self._num_sent = 0

    def run(self, warm_s: float, seconds: float) -> Measured:
        """Warms up, then measures. Once only."""
        for client in range(len(self._rngs)):
            self._send(client, self._make_one(self._rngs[client]))
        self._agenda.run_until(warm_s)
        computed = self._engine.num_computed
        self._agenda.run_until(warm_s + seconds)
        latencies: dict[RequestKind, list[float]] = {"generate": [], "embed": []}
        for at_s, kind, latency_s in self._ended:
            if at_s >= warm_s:
                latencies[kind].append(latency_s)
        return Measured(latencies, (self._engine.num_computed - computed) / seconds, seconds)

    def _send(self, client: int, arrival: Arrival) -> None:
        self._num_sent += 1
        job = Job(str(self._num_sent), arrival)
        self._sent[job] = (client, self._agenda.now_s)
        self._engine.add(job)

    def _end(self, job: Job) -> None:
        client, since_s = self._sent.pop(job)
        self._ended.append((self._agenda.now_s, job.arrival.kind, self._agenda.now_s - since_s))
        self._send(client, job.arrival.then or self._make_one(self._rngs[client]))


def capacity_tokens_per_s(spec: BatchSpec, make_one: MakeOne) -> float:
    """Tokens a second, prompts and outputs, that an engine makes of that mix when it is never idle."""
    measured = ClosedLoop(spec, make_one, num_clients=320).run(15.0, 30.0)
    return measured.tokens_per_s
