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
        self.pulse = CorePulse(self.ask, LIMITS)

    async def ask(self) -> Mapping[str, Any]:
        await self.well.wait()
        return {"totals": {"steps": self.num_steps}}


def with_core(story: Callable[[Core], Awaitable[None]], num_steps: int = 1000) -> int:
    """Runs `story` on a virtual clock beside a watched core that has answered once; returns how often it was stalled."""

    async def tell(_now: Any) -> int:
        core, stalls = Core(num_steps), [False]

        async def look() -> None:
            while True:
                is_stalled = core.pulse.problem is not None
                if is_stalled != stalls[-1]:
                    stalls.append(is_stalled)
                await asyncio.sleep(0.1)

        running = {asyncio.create_task(core.pulse.run()), asyncio.create_task(look())}
        await asyncio.sleep(1.0)
        await story(core)
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        return stalls.count(True)

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

    assert with_core(story) == 1


def test_a_core_that_stays_stalled_must_be_replaced() -> None:
    async def story(core: Core) -> None:
        core.well.clear()
        async with asyncio.timeout(140.0):
            await core.pulse.must_replace.wait()

    assert with_core(story) == 1


def test_steps_slower_than_the_questions_are_no_stall() -> None:
    async def story(core: Core) -> None:
        for _ in range(20):
            core.well.clear()
            await asyncio.sleep(50.0)
            core.well.set()
            await asyncio.sleep(0)

    assert with_core(story) == 0


def test_a_young_core_may_compile() -> None:
    async def story(core: Core) -> None:
        core.well.clear()
        await asyncio.sleep(2 * LIMITS.stall_s)
        assert core.pulse.problem is None
        await asyncio.sleep((YOUNG_FACTOR - 1) * LIMITS.stall_s)
        assert core.pulse.problem is not None

    assert with_core(story, num_steps=3) == 1


def test_an_event_loop_that_was_late_itself_blames_nobody() -> None:
    async def story(core: Core) -> None:
        core.well.clear()
        await asyncio.sleep(20.0)
        loop: Any = asyncio.get_running_loop()
        loop._jumping.now_s += 1000.0  # nothing ran meanwhile
        core.well.set()
        await asyncio.sleep(1.0)
        assert core.pulse.problem is None

    assert with_core(story) == 0


def test_an_error_is_an_answer() -> None:
    async def story(_core: Core) -> None:
        async def fail() -> Mapping[str, Any]:
            raise RuntimeError("EngineDeadError")

        pulse = CorePulse(fail, LIMITS)
        running = asyncio.create_task(pulse.run())
        for _ in range(100):
            await asyncio.sleep(LIMITS.stall_s / 20)
            assert pulse.problem is None
        running.cancel()
        await asyncio.wait({running})

    assert with_core(story) == 0
