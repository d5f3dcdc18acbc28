"""The waiting line of a mixed engine: first in, first out within a kind, and one queue object for every policy.

Decides which kind's head vLLM's waiting loop sees next, from quotas that a plan gives it. Leaves out how quotas are made
(`policy/step_plan.py`). It serves every policy, arrival order included, so that a policy can be switched while requests wait.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from typing_extensions import override

from orthrus_serve.engine.vllm_compat import Request, RequestQueue
from orthrus_serve.policy.step_plan import LANES, Ages, Lane, StepPlan, next_lane


def lane_of(request: Request) -> Lane:
    """The lane of a request: those with pooling parameters embed, all others generate."""
    return Lane.EMBED if request.pooling_params is not None else Lane.GENERATE


def adapter_of(request: Request) -> int:
    """The number of its adapter, 0 for none."""
    return request.lora_request.lora_int_id if request.lora_request else 0


def tokens_left(request: Request) -> int:
    """Known tokens of the request (prompt, and output of a preempted one) that are not computed yet."""
    return request.num_tokens - request.num_computed_tokens


# Of the oldest requests of a lane, how many are looked at: a preempted one stands before those that have waited longer.
_LOOKED_AT = 8


class _Added(NamedTuple):
    """Of a waiting request when it was added: its tokens left, the step, and the time."""

    tokens: int
    step: int
    at_s: float


class LaneQueue(RequestQueue):
    """Two lines, one per kind, behind vLLM's queue interface.

    Between `begin` and `end` (one `schedule()`), heads are offered as the plan's quotas allow; otherwise in arrival order.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lines: tuple[deque[Request], deque[Request]] = (deque(), deque())
        self._added: dict[str, _Added] = {}
        self._skipped: dict[str, _Added] = {}  # of those popped in this step
        self._step = 0
        self._tokens = [0, 0]
        self._plan: StepPlan | None = None
        self._left = [0, 0]
        self._offered: Lane | None = None

    def tick(self) -> None:
        """A step begins: waiting is counted in steps."""
        self._step += 1
        self._skipped.clear()

    def ages(self, max_wait_steps: int) -> Ages:
        """Which lanes' heads have waited for more than `max_wait_steps`, and which head is the older one."""
        heads = [lane for lane in LANES if self._lines[lane]]
        overdue = [
            lane for lane in heads if self._step - self._added[self._lines[lane][0].request_id].step > max_wait_steps
        ]
        return Ages(frozenset(overdue), self._oldest())

    def begin(self, plan: StepPlan) -> None:
        """Offers heads by this plan until `end`."""
        self._plan, self._left = plan, list(plan.quota)

    def end(self) -> None:
        """Back to arrival order."""
        self._plan, self._offered = None, None

    def take(self, lane: Lane, want: int) -> int:
        """Takes up to `want` tokens from the lane's quota; outside a plan there is none and all are granted."""
        if self._plan is None:
            return want
        granted = min(want, self._left[lane])
        self._left[lane] -= granted
        return granted

    def waiting_tokens(self, lane: Lane) -> int:
        """Tokens left of all waiting requests of a lane. O(1)."""
        return self._tokens[lane]

    def oldest_wait_s(self, lane: Lane) -> float:
        """For how long the oldest waiting request of a lane has waited, since it came or was preempted; 0 when none waits."""
        first = islice(self._lines[lane], _LOOKED_AT)
        since_s = [self._added[request.request_id].at_s for request in first]
        return max(0.0, self._clock() - min(since_s)) if since_s else 0.0

    def line(self, lane: Lane) -> deque[Request]:
        """The waiting requests of a lane, head first. Not to be changed."""
        return self._lines[lane]

    @override
    def add_request(self, request: Request) -> None:
        self._lines[lane_of(request)].append(request)
        self._count(request)

    @override
    def prepend_request(self, request: Request) -> None:
        self._lines[lane_of(request)].appendleft(request)
        self._count(request)

    @override
    def prepend_requests(self, requests: Iterable[Request]) -> None:
        # vLLM hands over what it skipped, last skipped first: pushing one by one to the left restores each line's order. To
        # be skipped is to go on waiting, so these keep their age.
        for request in requests:
            self._lines[lane_of(request)].appendleft(request)
            self._count(request, self._skipped.get(request.request_id))

    @override
    def peek_request(self) -> Request:
        lane = self._next()
        if lane is None:
            raise IndexError("peek from an empty queue")
        self._offered = lane
        return self._lines[lane][0]

    @override
    def pop_request(self) -> Request:
        # What was peeked is popped: its quota was taken in between, so asking again could name the other lane.
        lane = self._offered if self._offered is not None else self._next()
        if lane is None:
            raise IndexError("pop from an empty queue")
        self._offered = None
        request = self._lines[lane].popleft()
        self._skipped[request.request_id] = self._uncount(request)
        return request

    @override
    def remove_request(self, request: Request) -> None:
        self.remove_requests([request])

    @override
    def remove_requests(self, requests: Iterable[Request]) -> None:
        gone = set(requests)
        for lane in {lane_of(request) for request in gone}:
            line = self._lines[lane]
            kept = [request for request in line if request not in gone]
            line.clear()
            line.extend(kept)
        for request in gone:
            self._uncount(request)
        self._offered = None

    @override
    def __bool__(self) -> bool:
        return self._next() is not None

    @override
    def __len__(self) -> int:
        return sum(map(len, self._lines))

    @override
    def __iter__(self) -> Iterator[Request]:
        merged = [*self._lines[Lane.GENERATE], *self._lines[Lane.EMBED]]
        return iter(sorted(merged, key=lambda request: request.arrival_time))

    def _count(self, request: Request, before: _Added | None = None) -> None:
        # What was added is remembered: a preempted request may still grow while it waits (async scheduling delivers tokens
        # that were in flight), and a total that takes away more than was added never comes back to zero.
        tokens = tokens_left(request)
        step, at_s = (self._step, self._clock()) if before is None else (before.step, before.at_s)
        self._added[request.request_id] = _Added(tokens, step, at_s)
        self._tokens[lane_of(request)] += tokens

    def _uncount(self, request: Request) -> _Added:
        """Returns what was remembered of it."""
        added = self._added.pop(request.request_id, None) or _Added(0, self._step, self._clock())
        self._tokens[lane_of(request)] -= added.tokens
        return added

    def _next(self) -> Lane | None:
        if self._plan is None:
            return self._oldest()
        self._hand_over_unused()
        can_start = [bool(self._lines[lane]) and self._may_start(lane) for lane in LANES]
        return next_lane(self._left, self._plan.quota, can_start, self._plan.ages)

    def _oldest(self) -> Lane | None:
        lanes = [lane for lane in LANES if self._lines[lane]]
        return min(lanes, key=lambda lane: self._lines[lane][0].arrival_time) if lanes else None

    def _hand_over_unused(self) -> None:
        # A lane with nobody left to start gives what remains of its quota to the other (a prefix-cache hit took less than
        # planned). Not in alternating steps: there the other lane's quota is 0 on purpose.
        if self._plan is None or 0 in self._plan.quota:
            return
        for lane in LANES:
            if self._left[lane] and not self._lines[lane]:
                self._left[lane.other] += self._left[lane]
                self._left[lane] = 0

    def _may_start(self, lane: Lane) -> bool:
        """Whether a lane's head may start: not if it does not fit, nor if it is younger than a head that waits for memory.

        Freed KV blocks are kept for the older one, otherwise a stream of small requests of the other kind starves it.
        """
        assert self._plan is not None
        return lane not in self._plan.blocked and self._lines[lane][0].arrival_time <= self._plan.before
