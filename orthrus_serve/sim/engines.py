"""Two engines that can be worked out by hand: one request after the other, and all at once at the same speed.

Both compute a fixed number of tokens a second. They are the queues of the textbooks (M/G/1 in order of arrival, M/G/1 processor
sharing), against which the simulator is tested. Leaves out steps and batches (`batching.py`) and who sends what (`cluster.py`).
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import override

from orthrus_serve.policy.service_rate import Done
from orthrus_serve.policy.step_plan import Lane
from orthrus_serve.sim.events import Agenda
from orthrus_serve.sim.workload import Arrival


@dataclass(eq=False)
class Job:
    """A request inside an engine."""

    request_id: str
    arrival: Arrival
    num_done: float = 0.0

    @property
    def lane(self) -> Lane:
        """Its kind's lane."""
        return Lane.EMBED if self.arrival.kind == "embed" else Lane.GENERATE


Ended = Callable[[Job], None]
# As the channel reports it: lane, prompt tokens left, output tokens made, most output tokens.
Facts = dict[str, tuple[int, int, int, int]]


class VirtualEngine(Protocol):
    """What the cluster needs of an engine. It says by itself, to whoever made it, when a job has ended."""

    @property
    def num_computed(self) -> float:
        """Tokens computed since it started."""
        ...

    def done(self) -> Done:
        """What it has done since it started, as an engine's core counts it; kinds are not told apart."""
        ...

    def add(self, job: Job) -> None:
        """A request arrived."""
        ...

    def jobs(self) -> list[Job]:
        """Those that it holds, `num_done` as of now."""
        ...

    def set_speed(self, factor: float) -> None:
        """From now on it computes so many times as fast as it was made to; 0 stops it."""
        ...


def facts_of(engine: VirtualEngine, max_output: int | None) -> Facts:
    """What the engine's core would report; outputs may have so many tokens, None is as many as they will."""
    facts: Facts = {}
    for job in engine.jobs():
        made = max(0, int(job.num_done) - job.arrival.num_prompt)
        most = job.arrival.num_output if max_output is None else max_output
        most = most if job.lane is Lane.GENERATE else 0
        facts[job.request_id] = (int(job.lane), max(0, job.arrival.num_prompt - int(job.num_done)), made, most)
    return facts


class _FluidEngine:
    """What both have in common: one event for the next end, which counts only if nothing has changed since it was entered."""

    def __init__(self, agenda: Agenda, tokens_per_s: float, ended: Ended) -> None:
        self._agenda = agenda
        self._full_tokens_per_s = self._tokens_per_s = tokens_per_s
        self._ended = ended
        self._seen_s = 0.0
        self._version = 0
        self._num_computed = 0.0
        self._busy_s = 0.0

    @property
    def num_computed(self) -> float:
        self._advance()
        return self._num_computed

    def done(self) -> Done:
        self._advance()
        return Done({"generate": int(self._num_computed)}, int(self._num_steps()), self._busy_s)

    def add(self, job: Job) -> None:
        self._advance()
        self._take(job)
        self._expect()

    def set_speed(self, factor: float) -> None:
        self._advance()
        self._tokens_per_s = self._full_tokens_per_s * factor
        self._expect()

    def _expect(self) -> None:
        self._version += 1
        left = self._least_left()
        if left is not None and self._tokens_per_s > 0:
            self._agenda.after(left / self._tokens_per_s, self._end, self._version)

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        job = self._pop()
        job.num_done = job.arrival.num_tokens
        self._expect()
        self._ended(job)

    def _advance(self) -> None:
        raise NotImplementedError

    def _num_steps(self) -> float:
        """Forward passes, if each made one token for everyone who takes part."""
        raise NotImplementedError

    def _take(self, job: Job) -> None:
        raise NotImplementedError

    def _pop(self) -> Job:
        raise NotImplementedError

    def _least_left(self) -> float | None:
        """Tokens to compute, everybody's together, before the next end; None when there is nobody."""
        raise NotImplementedError


class SerialEngine(_FluidEngine):
    """One request after the other, in order of arrival."""

    def __init__(self, agenda: Agenda, tokens_per_s: float, ended: Ended) -> None:
        super().__init__(agenda, tokens_per_s, ended)
        self._line: deque[Job] = deque()

    def jobs(self) -> list[Job]:
        self._advance()
        return list(self._line)

    @override
    def _advance(self) -> None:
        passed_s = self._agenda.now_s - self._seen_s
        done = passed_s * self._tokens_per_s
        self._seen_s = self._agenda.now_s
        if self._line:
            self._busy_s += passed_s
            head = self._line[0]
            done = min(done, head.arrival.num_tokens - head.num_done)
            head.num_done += done
            self._num_computed += done

    @override
    def _num_steps(self) -> float:
        return self._num_computed

    @override
    def _take(self, job: Job) -> None:
        self._line.append(job)

    @override
    def _pop(self) -> Job:
        job = self._line.popleft()
        self._num_computed += job.arrival.num_tokens - job.num_done  # what rounding has left
        return job

    @override
    def _least_left(self) -> float | None:
        return self._line[0].arrival.num_tokens - self._line[0].num_done if self._line else None


class SharedEngine(_FluidEngine):
    """All requests at once, each at the same speed. Kept by what everyone has got so far: a job ends when that reaches what
    it was at its start plus its own size."""

    def __init__(self, agenda: Agenda, tokens_per_s: float, ended: Ended) -> None:
        super().__init__(agenda, tokens_per_s, ended)
        self._got = 0.0
        self._heap: list[tuple[float, int, Job]] = []
        self._num_taken = 0

    def jobs(self) -> list[Job]:
        self._advance()
        for ends_at, _, job in self._heap:
            job.num_done = max(0.0, job.arrival.num_tokens - (ends_at - self._got))
        return [job for _, _, job in self._heap]

    @override
    def _advance(self) -> None:
        passed_s = self._agenda.now_s - self._seen_s
        self._seen_s = self._agenda.now_s
        if self._heap:
            self._busy_s += passed_s
            self._got += passed_s * self._tokens_per_s / len(self._heap)
            self._num_computed += passed_s * self._tokens_per_s

    @override
    def _num_steps(self) -> float:
        return self._got

    @override
    def _take(self, job: Job) -> None:
        self._num_taken += 1
        heapq.heappush(self._heap, (self._got + job.arrival.num_tokens - job.num_done, self._num_taken, job))

    @override
    def _pop(self) -> Job:
        return heapq.heappop(self._heap)[2]

    @override
    def _least_left(self) -> float | None:
        return max(0.0, self._heap[0][0] - self._got) * len(self._heap) if self._heap else None
