"""Places kept for refused requests that were told when to come back. Pure.

Under lasting overload a client that comes back meets as many newcomers as at first. So that `Retry-After` is honest, who was
refused and comes back at its time goes before newcomers: `admission.py` gives it more headroom, and tells it a time at which
the work of those who were told before it has had its turn. Nothing is held free for them: who does not come back costs nothing,
and how many do is learnt. Guards: bounded in number and in time. Leaves out how a request is known again (a hash).
"""

import heapq
from dataclasses import dataclass

# The latest that anybody is told to come back, and how late one may be.
MAX_WAIT_S = 60.0
GRACE_S = 5.0
EARLY_S = 0.05
MAX_PROMISES = 20_000
# How fast the share of those who come back is learnt.
SHARE_GAIN = 0.02


@dataclass(frozen=True)
class _Promise:
    due_s: float
    num_tokens: int


class Promises:
    """Who was told to come back, and when."""

    def __init__(self) -> None:
        self._open: dict[int, _Promise] = {}
        self._by_due: list[tuple[float, int]] = []
        self._num_tokens = 0
        self.share = 0.5

    @property
    def expected_tokens(self) -> float:
        """Work of those who were told to come back and, going by the past, will."""
        return self._num_tokens * self.share

    def promise(self, request: int, num_tokens: int, wait_s: float, now_s: float) -> float:
        """Keeps a place for a request in `wait_s`, if that is soon enough, and returns in how many seconds to come back.

        Args:
            request: by which it is known when it comes back.
            num_tokens: its work.
        """
        self._expire(now_s)
        self._take_back(request)
        if wait_s > MAX_WAIT_S or len(self._open) >= MAX_PROMISES:
            return MAX_WAIT_S  # and no promise
        self._open[request] = _Promise(now_s + wait_s, num_tokens)
        heapq.heappush(self._by_due, (now_s + wait_s, request))
        self._num_tokens += num_tokens
        return wait_s

    def is_due(self, request: int, now_s: float) -> bool:
        """Whether this request was refused before, and comes back at the time that it was told."""
        self._expire(now_s)
        promise = self._open.get(request)
        return promise is not None and promise.due_s - EARLY_S <= now_s

    def redeem(self, request: int) -> None:
        """It came back."""
        if self._take_back(request):
            self.share += (1.0 - self.share) * SHARE_GAIN

    def _take_back(self, request: int) -> bool:
        promise = self._open.pop(request, None)
        if promise is None:
            return False
        self._num_tokens -= promise.num_tokens
        return True

    def _expire(self, now_s: float) -> None:
        while self._by_due and self._by_due[0][0] + GRACE_S < now_s:
            due_s, request = heapq.heappop(self._by_due)
            promise = self._open.get(request)
            if promise is not None and promise.due_s == due_s:
                self._take_back(request)
                self.share -= self.share * SHARE_GAIN
