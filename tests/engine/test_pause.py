"""A paused engine: what runs is kept or drained, what comes waits, and everything is right after the resumption."""

import random
from collections.abc import Callable, Iterator

import pytest
from vllm.v1.core.sched.interface import PauseState

from tests.engine.harness import POOLINGS, Engine, TinyModel, token_ids

POLICIES = ("orthrus", "hetero_fcfs", "unified_homo")


@pytest.fixture(scope="module")
def engine(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(tiny, tmp_path_factory.mktemp("pause") / "steps.jsonl", budget=48, enable_prefix_caching=True)
    yield engine
    engine.close()


class Mix:
    """Two prompts and four inputs of several chunks each, begun and three steps old."""

    def __init__(self, engine: Engine, rng: random.Random, name: str) -> None:
        self.engine, self.name = engine, name
        self.prompts = [token_ids(rng, n) for n in (30, 90)]
        self.inputs = [token_ids(rng, n) for n in (70, 150, 110, 40)]
        for i, prompt in enumerate(self.prompts):
            engine.generate(f"{name}-g{i}", prompt, 10)
        for i, tokens in enumerate(self.inputs):
            engine.embed(f"{name}-e{i}", tokens, POOLINGS[i])
        for _ in range(3):
            engine.step()

    def check(self) -> None:
        for i, prompt in enumerate(self.prompts):
            assert self.engine.tokens(f"{self.name}-g{i}") == self.engine.tiny.greedy(prompt, 10)
        for i, tokens in enumerate(self.inputs):
            assert self.engine.cosine(f"{self.name}-e{i}", tokens, POOLINGS[i]) > 0.99999


def pause_and_keep(engine: Engine) -> None:
    engine.llm.engine_core.engine_core.pause_scheduler("keep", clear_cache=True)  # type: ignore[attr-defined]


def sleep_without_a_level(engine: Engine) -> None:
    engine.llm.engine_core.engine_core.sleep(0, "keep")  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("pause", [pause_and_keep, sleep_without_a_level])
def test_what_was_kept_goes_on_after_the_pause(
    engine: Engine, rng: random.Random, pause: Callable[[Engine], None], policy: str
) -> None:
    engine.scheduler.answer("set", {"policy": policy})
    mix = Mix(engine, rng, f"{pause.__name__}-{policy}")
    pause(engine)
    before = engine.totals()["steps"]
    for _ in range(5):
        engine.step()
    assert engine.totals()["steps"] == before
    engine.llm.engine_core.engine_core.resume_scheduler()  # type: ignore[attr-defined]
    engine.run()
    mix.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_while_an_engine_drains_what_is_new_waits(engine: Engine, rng: random.Random, policy: str) -> None:
    engine.scheduler.answer("set", {"policy": policy})
    mix = Mix(engine, rng, f"old-{policy}")
    running = {request.request_id for request in engine.scheduler.running}
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)  # what the mode "wait" sets until all that runs is done
    engine.embed(f"new-{policy}", mix.inputs[0], "last")
    for _ in range(200):
        engine.step()
        if not engine.scheduler.running:
            break
    assert not engine.scheduler.running
    assert running
    assert f"new-{policy}" not in engine.results
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    mix.check()
    assert engine.cosine(f"new-{policy}", mix.inputs[0], "last") > 0.99999
    assert not any(value for name, value in engine.leaks().items() if name != "kv_blocks")
