"""An event loop whose clock jumps to the next deadline instead of waiting: timing tests are exact and take no time."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from typing_extensions import override

Out = TypeVar("Out")


class _JumpingSelector(selectors.SelectSelector):
    now_s = 0.0

    @override
    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("every task waits for something that will never come")
        self.now_s += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """For coroutines that only sleep and wait for each other; no sockets."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    @override
    def time(self) -> float:
        return self._jumping.now_s


def run_virtually(make: Any) -> Any:
    """Runs the coroutine `make(now)` to its end on a virtual clock that starts at 0."""
    loop = VirtualLoop()
    try:
        coroutine: Coroutine[Any, Any, Any] = make(loop.time)
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()
