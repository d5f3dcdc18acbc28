"""Admission before a real engine on CPU (a tiny model), in bursts: with time for all, with time for some, without a goal.

What it does to latency and goodput is measured by `admission_real.py`: such figures are the machine's as much as ours, and no
test asserts them.
"""

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from ray import serve

from orthrus_serve.app import build
from tests.serve.admission_real import GOAL_HEADERS, closed_loop, mixed, real_args
from tests.serve.conftest import App, computed_tokens
from tests.serve.overload import Answer, Due, play
from tests.serve.test_fake_app import until

NUM = 80


@pytest.fixture(scope="module")
def guarded(serve_url: str, tiny: Any) -> Iterator[App]:
    serve.run(build(real_args(tiny)), name="guarded-real", route_prefix="/guarded-real")
    app = App("guarded-real", f"{serve_url}/guarded-real")
    asyncio.run(closed_loop(app.url, 4, 3.0))  # by which the speed of the engine is known
    yield app
    serve.delete("guarded-real", _blocking=False)


def computed(app: App) -> int:
    """Tokens that the engine has computed in all, once nothing is charged."""
    until(lambda: [(front["open"], front["tokens"], front["drift"]) for front in app.info("Front")] == [(0, 0, 0)], 60)
    (tokens,) = computed_tokens(app, 1).values()
    return tokens


def at_once(app: App, goal_s: float, seed: int) -> list[Answer]:
    rng = random.Random(seed)
    requests = [Due(0.0, *mixed(rng)) for _ in range(NUM)]
    goals = [replace(due, headers={GOAL_HEADERS[due.kind]: str(int(1000 * goal_s))}) for due in requests]
    return asyncio.run(play(app.url, goals))


def tokens_of(answers: list[Answer]) -> int:
    """What an engine computes for those that were answered. The last token of a generation is not computed again."""
    return sum(a.due.num_tokens - (a.due.kind == "generate") for a in answers if a.status == 200)


def test_of_a_burst_some_are_admitted_and_what_is_refused_never_reaches_the_engine(guarded: App) -> None:
    before, began_s = computed(guarded), time.monotonic()
    answers = at_once(guarded, 3600.0, 1)
    took_s, between = time.monotonic() - began_s, computed(guarded)
    assert [answer.status for answer in answers] == [200] * NUM  # all of them, given an hour
    assert between - before == tokens_of(answers)
    answers = at_once(guarded, took_s / 4, 2)  # most of them would be late, however fast this machine is
    assert {answer.status for answer in answers} == {200, 503}
    for answer in answers:
        if answer.status == 503:
            assert 1 <= int(answer.headers["Retry-After"]) <= 60
            assert 0 < int(answer.headers["retry-after-ms"]) <= 60_000
    assert computed(guarded) - between == tokens_of(answers)


def test_after_a_burst_a_request_without_a_goal_is_admitted_whatever_waits(guarded: App) -> None:
    rng = random.Random(3)
    answers = asyncio.run(play(guarded.url, [Due(0.0, *mixed(rng)) for _ in range(NUM)]))
    assert [answer.status for answer in answers] == [200] * NUM
