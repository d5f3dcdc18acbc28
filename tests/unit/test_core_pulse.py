"""The pulse of a core: silence is a stall, a slow step or a late event loop is not."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from orthrus_serve.serving.core_pulse import YOUNG_FACTOR, CorePulse, PulseLimits
from tests.unit.loadgen.virtual_time import run_virtually

LIMITS = PulseLimits(stall_s=60.0, replace_after_s=60.0)


class Core:
    """Answers at once, unless it is stuck."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.well = asyncio.Event()
        self.well.set()
        self.changes: list[str | None] = []
        self.pulse = CorePulse(self.ask, LIMITS, lambda: self.changes.append(self.pulse.problem))

    async def ask(self) -> Mapping[str, Any]:
        await self.well.wait()
        return {"totals": {"steps": self.num_steps}}


def with_core(story: Callable[[Core], Awaitable[None]], num_steps: int = 1000) -> list[str | None]:
    """Runs `story` on a virtual clock beside a watched core that has answered once; returns the changes of its problem."""

    async def tell(_now: Any) -> list[str | None]:
        core = Core(num_steps)
        running = asyncio.create_task(core.pulse.run())
        await asyncio.sleep(1.0)
        await story(core)
        running.cancel()
        await asyncio.wait({running})
        return core.changes

    return run_virtually(tell)


def test_a_core_that_is_silent_for_too_long_is_stalled_until_it_answers() -> None:
    async def story(core: Core) -> None:
        core.well.clear()
        await asyncio.sleep(55.0)
        assert core.pulse.problem is None
        await asyncio.sleep(20.0)
        assert core.pulse.problem is not None
        assert core.pulse.problem.startswith("the engine core is stalled: it has not answered for ")
        assert not core.pulse.must_replace.is_set()
        core.well.set()
        await asyncio.sleep(1.0)
        assert core.pulse.problem is None

    assert len(with_core(story)) == 2


def test_a_core_that_stays_stalled_must_be_replaced() -> None:
    async def story(core: Core) -> None:
        core.well.clear()
        async with asyncio.timeout(140.0):
            await core.pulse.must_replace.wait()

    assert len(with_core(story)) == 1


def test_steps_slower_than_the_questions_are_no_stall() -> None:
    async def story(core: Core) -> None:
        for _ in range(20):
            core.well.clear()
            await asyncio.sleep(50.0)
            core.well.set()
            await asyncio.sleep(0)

    assert with_core(story) == []


def test_a_young_core_may_compile() -> None:
    async def story(core: Core) -> None:
        core.well.clear()
        await asyncio.sleep(2 * LIMITS.stall_s)
        assert core.pulse.problem is None
        await asyncio.sleep((YOUNG_FACTOR - 1) * LIMITS.stall_s)
        assert core.pulse.problem is not None

    assert len(with_core(story, num_steps=3)) == 1


def test_an_event_loop_that_was_late_itself_blames_nobody() -> None:
    async def story(core: Core) -> None:
        core.well.clear()
        await asyncio.sleep(20.0)
        loop: Any = asyncio.get_running_loop()
        loop._jumping.now_s += 1000.0  # nothing ran meanwhile
        core.well.set()
        await asyncio.sleep(1.0)
        assert core.pulse.problem is None

    assert with_core(story) == []


def test_an_error_is_an_answer() -> None:
    async def story(core: Core) -> None:
        async def fail() -> Mapping[str, Any]:
            raise RuntimeError("EngineDeadError")

        pulse = CorePulse(fail, LIMITS, lambda: core.changes.append("changed"))
        running = asyncio.create_task(pulse.run())
        await asyncio.sleep(3 * LIMITS.stall_s)
        running.cancel()
        await asyncio.wait({running})

    assert with_core(story) == []
