"""A clock that jumps from event to event. Leaves out what happens (engines, cluster)."""

import heapq
from collections.abc import Callable
from typing import Any


class Agenda:
    """What is known to come, in order of time; what is due at one moment happens in the order in which it was entered."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_entered = 0

    def at(self, at_s: float, happen: Callable[..., None], *details: Any) -> None:
        """`happen(*details)` will be called then, or now if that is past."""
        self._num_entered += 1
        heapq.heappush(self._due, (max(at_s, self.now_s), self._num_entered, happen, details))

    def after(self, delay_s: float, happen: Callable[..., None], *details: Any) -> None:
        """The same, so many seconds from now."""
        self.at(self.now_s + delay_s, happen, *details)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Lets things happen until it is over.

        Raises:
            RuntimeError: it is not, and nothing more is to come.
        """
        while not is_over():
            if not self._due:
                raise RuntimeError("nothing more is to come, and it is not over")
            self.now_s, _, happen, details = heapq.heappop(self._due)
            happen(*details)

    def run_until(self, at_s: float) -> None:
        """Lets everything happen that is due until then."""
        while self._due and self._due[0][0] <= at_s:
            self.now_s, _, happen, details = heapq.heappop(self._due)
            happen(*details)
        self.now_s = max(self.now_s, at_s)
