"""Copies of requests run apart from the request that they are made of, bounded, and touch nobody."""

import asyncio
import random
from typing import Any

import pytest
from ray.serve.context import _get_serve_request_context as request_context

from orthrus_serve.config.load import parse_args
from orthrus_serve.errors import RequestError
from orthrus_serve.policy.charge import ChargeEstimator, RequestShape
from orthrus_serve.serving.exchange import Exchange
from orthrus_serve.serving.live_arms import Arm, LiveArms
from orthrus_serve.serving.live_routing import LiveRouting
from orthrus_serve.serving.metrics_export import FrontMetrics
from orthrus_serve.serving.mirror import Mirrors
from orthrus_serve.serving.router_state import RouterState
from orthrus_serve.serving.tunnel import TunnelRequest

ARGS: dict[str, Any] = {
    "model": {"path": "/m"},
    "adapters": {"e": {"path": "/a"}},
    "arms": {"old": {"topology": "hetero_fcfs"}, "new": {"topology": "orthrus"}},
}
REQUEST = TunnelRequest("POST", "/v1/embeddings", b"", [(b"x-request-id", b"mine"), (b"accept", b"*/*")], b"{}")
SHAPE = RequestShape("embed", body_bytes=2)


class Copies:
    """Two arms with a mirror between them, and what was asked of the second."""

    def __init__(self, share: float = 1.0, max_copies: int = 9, error: Exception | None = None) -> None:
        args = parse_args(ARGS)
        arms: list[Arm] = []
        for name, of_arm in args.by_arm.items():
            state, nothing = RouterState(), None
            arms.append(Arm(name, nothing, nothing, ChargeEstimator(), state, LiveRouting(of_arm, state)))  # type: ignore[arg-type]
        self.arms = LiveArms(args, arms, random.Random(1))
        self.arms.change({"mirror": {"from": "old", "to": "new", "share": share}})
        assert self.arms.describe()["refused"] is None
        self.error = error
        self.asked: list[tuple[TunnelRequest, str, str]] = []
        self.metrics = FrontMetrics()
        self.go_on = asyncio.Event()
        self.mirrors = Mirrors(self.answer, self.arms, self.metrics, max_copies)

    async def answer(self, request: TunnelRequest, _shape: RequestShape | None, arm: Arm, exchange: Exchange) -> None:
        self.asked.append((request, arm.name, request_context()._internal_request_id))
        await self.go_on.wait()
        if self.error is not None:
            raise self.error
        await exchange({"type": "http.response.start", "status": 200, "headers": []})
        await exchange({"type": "http.response.body", "body": b"{}", "more_body": False})

    async def copy(self, count: int, arm: str = "old") -> None:
        source = self.arms.named(arm)
        assert source is not None
        for _ in range(count):
            self.mirrors.copy(REQUEST, SHAPE, source)
        await asyncio.sleep(0)

    def counted(self, copied: str) -> bool:
        return f'orthrus_mirrored_requests_total{{arm="new",copied="{copied}",kind="embed"}}' in self.metrics.text()


async def test_a_copy_is_another_request_with_the_same_body() -> None:
    copies = Copies()
    await copies.copy(2)
    assert [arm for _, arm, _ in copies.asked] == ["new", "new"]
    ids = [dict(request.headers)[b"x-request-id"] for request, _, _ in copies.asked]
    internal = [internal for _, _, internal in copies.asked]
    assert len({*ids, b"mine"}) == 3
    assert len({*internal, request_context()._internal_request_id}) == 3
    assert {(request.body, len(request.headers)) for request, _, _ in copies.asked} == {(b"{}", 2)}
    copies.go_on.set()
    await asyncio.sleep(0.01)
    assert copies.counted("ok")


async def test_a_share_of_what_the_source_answers_is_copied_and_nothing_of_the_other_arm() -> None:
    copies = Copies(share=0.3, max_copies=1000)
    await copies.copy(200)
    assert 40 < len(copies.asked) < 80
    copies.asked.clear()
    await copies.copy(10, "new")
    assert copies.asked == []


async def test_beyond_a_number_in_flight_copies_are_dropped_and_counted() -> None:
    copies = Copies(max_copies=3)
    await copies.copy(5)
    assert (len(copies.asked), copies.counted("dropped")) == (3, True)
    copies.go_on.set()
    await asyncio.sleep(0.01)
    await copies.copy(1)
    assert len(copies.asked) == 4


@pytest.mark.parametrize(
    ("error", "copied"),
    [(RequestError(503, "none", code="no_replica"), "overloaded"), (RuntimeError("a bug"), "failed")],
)
async def test_a_copy_that_fails_is_counted_and_that_is_all(error: Exception, copied: str) -> None:
    copies = Copies(error=error)
    copies.go_on.set()
    await copies.copy(1)
    await asyncio.sleep(0.01)
    assert copies.counted(copied)
