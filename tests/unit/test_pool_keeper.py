"""The keeper of a pool: probes of both kinds bring a replica back, reports put it out, and nothing it meets ends it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from orthrus_serve.config.schema import AppArgs
from orthrus_serve.policy.quarantine import QuarantineRules
from orthrus_serve.serving import pool_keeper
from orthrus_serve.serving.pool import PoolUnavailableError, ReplicaLostError
from orthrus_serve.serving.pool_keeper import PoolKeeper, make_probes
from orthrus_serve.serving.router_state import RouterState
from orthrus_serve.serving.tunnel import Start, TunnelRequest
from orthrus_serve.types import ReplicaId, RequestKind

A, B = ReplicaId("a"), ReplicaId("b")
RULES = QuarantineRules(max_failures=1, first_gap_s=0.01, longest_gap_s=0.04)
ARGS = AppArgs.model_validate(
    {"topology": "orthrus", "model": {"path": "/x", "name": "base"}, "adapters": {"one": {"path": "/x"}, "two": {"path": "/x"}}}
)  # fmt: skip


class Call:
    def __init__(self, outcome: Any) -> None:
        self._outcome = outcome
        self.replica_id = None
        self.placed_s = None

    async def __aiter__(self) -> AsyncIterator[Start | bytes]:
        if self._outcome is ...:
            await asyncio.Event().wait()
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        yield self._outcome, []

    def cancel(self) -> None: ...


class Replicas:
    """A pool whose replicas answer each kind as they are told to."""

    name = "Engine"

    def __init__(self) -> None:
        self.outcomes: dict[RequestKind, Any] = {"embed": 200, "generate": 200}
        self.asked: list[tuple[RequestKind, str, str]] = []
        self.answers: list[Any] = []

    def open(self, request: TunnelRequest, *, kind: RequestKind, only: str) -> Any:
        self.asked.append((kind, request.path, only))
        return Call(self.outcomes[kind])

    async def ask_all(self, method: str, timeout_s: float) -> list[Any]:
        if not self.answers:
            raise RuntimeError("nobody to ask")
        return self.answers


@contextlib.asynccontextmanager
async def kept(replicas: Any, probe_timeout_s: float = 0.05) -> AsyncIterator[tuple[PoolKeeper, RouterState]]:
    state = RouterState(replicas=(A, B))
    keeper = PoolKeeper(replicas, state, RULES, make_probes(ARGS), probe_timeout_s)
    running = asyncio.create_task(keeper.run())
    try:
        yield keeper, state
        assert not running.done()
    finally:
        running.cancel()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - nothing to wait on from outside
            await asyncio.sleep(0.005)


async def test_a_replica_that_answers_probes_of_both_kinds_comes_back() -> None:
    replicas = Replicas()
    async with kept(replicas) as (keeper, state):
        keeper.ended("embed", [A], B, "status 500")
        assert set(state.quarantined) == {A}
        await until(lambda: not state.quarantined)
    assert replicas.asked == [("embed", "/v1/embeddings", "a"), ("generate", "/v1/completions", "a")]


async def test_a_replica_that_fails_probes_of_one_kind_stays_out() -> None:
    for bad in (500, 503, ..., ReplicaLostError(), PoolUnavailableError(), KeyError("unforeseen")):
        replicas = Replicas()
        replicas.outcomes["generate"] = bad
        async with kept(replicas) as (keeper, state):
            keeper.ended("embed", [A], B, "status 500")
            await until(lambda asked=replicas.asked: len(asked) >= 4)
            assert set(state.quarantined) == {A}
            replicas.outcomes["generate"] = 200
            await until(lambda state=state: not state.quarantined)


async def test_a_probe_that_is_refused_does_not_keep_a_replica_out_for_ever() -> None:
    replicas = Replicas()
    replicas.outcomes["embed"] = 400
    async with kept(replicas) as (keeper, state):
        keeper.ended("embed", [A], B, "status 500")
        await until(lambda: not state.quarantined)


async def test_a_replica_that_is_gone_is_forgotten_even_when_it_was_blamed_late() -> None:
    replicas = Replicas()
    replicas.outcomes["embed"] = 500
    async with kept(replicas) as (keeper, state):
        state.replicas = (B,)
        keeper.ended("embed", [A], B, "lost")
        await until(lambda: not state.quarantined)


async def test_a_replica_that_names_a_problem_is_out_and_errors_of_asking_end_nothing(monkeypatch: Any) -> None:
    monkeypatch.setattr(pool_keeper, "ASK_GAP_S", 0.01)
    replicas = Replicas()
    replicas.outcomes["embed"] = ...
    async with kept(replicas) as (_, state):
        await asyncio.sleep(0.05)
        replicas.answers = [{"replica": "a", "problem": "stalled"}, {"replica": "b", "problem": None}, TimeoutError()]
        await until(lambda: state.quarantined == {A: "stalled"})
        replicas.answers = [{"replica": "a", "problem": None}]
        replicas.outcomes["embed"] = 200
        await until(lambda: not state.quarantined)


def test_probes_use_names_that_the_configuration_serves() -> None:
    probes = make_probes(ARGS)
    assert b'"model": "one"' in probes["embed"].body
    assert b'"model": "base"' in probes["generate"].body
