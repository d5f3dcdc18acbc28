"""The Front's door: headers in, a visit or a refusal out; what it learns, and what of it reaches an engine."""

import json
from typing import Any

import pytest

from orthrus_serve.config.clients import AdmissionSpec
from orthrus_serve.errors import RequestError
from orthrus_serve.policy.charge import ChargeEstimator
from orthrus_serve.policy.service_rate import Done
from orthrus_serve.serving.admission import Door, TurnedAwayError, Visit, _duration, key_accounts
from orthrus_serve.serving.charging import shape_of_request
from orthrus_serve.serving.engine_reports import ReplicaReport, done_by
from orthrus_serve.serving.front import _forwarded_headers
from orthrus_serve.serving.metrics_export import FrontMetrics
from orthrus_serve.serving.router_state import RouterState
from orthrus_serve.serving.tunnel import TunnelRequest
from orthrus_serve.types import ReplicaId, RequestId

R1 = ReplicaId("r1")


class Entrance:
    """A door to one replica that computes 1000 tokens a second."""

    def __init__(self, spec: dict[str, Any], is_known: bool = True) -> None:
        self.metrics = FrontMetrics()
        self.load = RouterState(replicas=(R1,))
        admission = AdmissionSpec.model_validate(spec)
        self.door = Door(admission, key_accounts(admission, 1), self.load, ChargeEstimator(), self.metrics)
        if is_known:
            self.door.take_report(ReplicaReport("r1", {}, Done({"embed": 1000}, 10, 1.0)))

    def enter(self, num_tokens: int = 100, **headers: str) -> Visit:
        body = json.dumps({"input": [[1] * num_tokens]}).encode()
        request = TunnelRequest("POST", "/v1/embeddings", b"", [], body)
        given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        shape = shape_of_request(request.path, request.body)
        assert shape is not None
        return self.door.enter(request, shape, given)

    def hold(self, num_tokens: int) -> None:
        self.load.ledger.charge(RequestId("other"), R1, num_tokens)


def test_a_request_is_let_in_when_its_goal_is_near_and_refused_when_it_is_far() -> None:
    entrance = Entrance({"embed": {"e2e_ms": 1000}})
    entrance.enter()
    entrance.hold(2000)
    with pytest.raises(TurnedAwayError) as refused:
        entrance.enter()
    headers = dict(refused.value.headers)
    assert (refused.value.status, refused.value.code) == (503, "overloaded")
    assert (headers[b"retry-after"], headers[b"retry-after-ms"]) == (b"2", b"1567")
    assert 'orthrus_refusals_total{kind="embed",reason="saturated"} 1.0' in entrance.metrics.text()
    entrance.enter(x_slo_e2e_ms="10000")


def test_priority_decides_at_the_same_backlog() -> None:
    entrance = Entrance({"embed": {"e2e_ms": 1000}})
    entrance.hold(400)  # 0.5 s are predicted, times 1.5 for want of experience
    entrance.enter(x_priority="high")
    entrance.enter()
    with pytest.raises(TurnedAwayError):
        entrance.enter(x_priority="low")


def test_calls_that_are_not_placed_yet_count() -> None:
    entrance = Entrance({"embed": {"e2e_ms": 1000}})
    entrance.load.coming = {"a": 1000, "b": 1000}
    with pytest.raises(TurnedAwayError):
        entrance.enter()


def test_a_key_that_is_over_its_limit_is_told_and_a_refusal_for_want_of_room_costs_it_nothing() -> None:
    entrance = Entrance({"embed": {"e2e_ms": 1000}, "each_key": {"requests_per_minute": 1}})
    entrance.hold(5000)
    for _ in range(3):
        with pytest.raises(TurnedAwayError, match="overloaded"):
            entrance.enter(authorization="Bearer a")
    entrance.load.ledger.settle(RequestId("other"))
    entrance.enter(authorization="Bearer a").leave()
    with pytest.raises(TurnedAwayError, match="requests per minute") as refused:
        entrance.enter(authorization="bearer  a")
    assert refused.value.status == 429
    assert dict(refused.value.headers)[b"x-ratelimit-remaining-requests"] == b"0"
    entrance.enter(authorization="Bearer b")


def test_a_visit_adds_headers_sees_the_usage_and_settles_it_once() -> None:
    entrance = Entrance({"embed": {"e2e_ms": 60000}, "each_key": {"tokens_per_minute": 1000}})
    visit = entrance.enter(800)
    start = visit.saw({"type": "http.response.start", "status": 200, "headers": []})
    assert (b"x-ratelimit-remaining-tokens", b"200") in start["headers"]
    visit.saw({"type": "http.response.body", "body": b'{"usage": {"prompt_tokens": 300}}', "more_body": False})
    visit.leave()
    visit.leave()
    state = dict(entrance.door.limit_headers(""))
    assert 699 <= int(state[b"x-ratelimit-remaining-tokens"]) <= 701
    assert 'orthrus_goals_total{goal="e2e",kind="embed",result="met"}' in entrance.metrics.text()


def test_goal_priority_and_key_do_not_travel_to_the_engine() -> None:
    headers = [
        (b"x-slo-ttft-ms", b"1"),
        (b"x-slo-e2e-ms", b"1"),
        (b"x-priority", b"low"),
        (b"authorization", b"Bearer a"),
    ]
    assert {name for name, _ in _forwarded_headers(headers, "id", 0)} == {b"x-request-id", b"content-length"}


@pytest.mark.parametrize(("name", "value"), [("x_slo_e2e_ms", "0"), ("x_slo_ttft_ms", "inf"), ("x_priority", "")])
def test_a_header_that_cannot_be_read_is_named(name: str, value: str) -> None:
    with pytest.raises(RequestError) as refused:
        Entrance({}).enter(**{name: value})
    assert (refused.value.status, refused.value.param) == (400, name.replace("_", "-"))


def test_durations_are_written_as_openai_does() -> None:
    assert [_duration(seconds) for seconds in (0, 0.0201, 1.5, 59, 61, 360)] == [
        "0ms",
        "21ms",
        "1.5s",
        "59s",
        "1m1s",
        "6m0s",
    ]


def test_an_engines_totals_become_what_it_has_done() -> None:
    totals = {"prefill_tokens": 5, "decode_tokens": 6, "embed_tokens": 7, "steps": 3, "busy_s": 0.5, "other": 1}
    assert done_by(totals) == Done({"generate": 11, "embed": 7}, 3, 0.5)
    assert done_by({}) == Done({"generate": 0, "embed": 0}, 0, 0.0)
