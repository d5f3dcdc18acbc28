"""The status page says what each Front and engine said, and names those that said nothing."""

import logging
from typing import Any

import orthrus_serve
from orthrus_serve.policy.roles import Split
from orthrus_serve.serving.live_status import live_status
from orthrus_serve.serving.router_state import RouterState
from orthrus_serve.serving.status import installed_versions, log_start
from orthrus_serve.types import ReplicaId

FRONT: dict[str, Any] = {
    "front": "f1", "topology": "dedicated", "rule": "round_robin", "dedicated": {"embed": 1, "generate": 2},
    "disagg_pd": None, "refused": None, "replicas": ["a", "b", "c"], "quarantined": {}, "routed": 7, "open": 1, "tokens": 30,
}  # fmt: skip


def engine(replica: str, **changes: Any) -> dict[str, Any]:
    return {
        "replica": replica, "pid": 1, "topology": "dedicated", "open": 2, "in_engine": 1, "kept": 0,
        "remaining_tokens": {"generate": 5, "embed": 0}, "report": {"policy": "hetero_fcfs", "totals": {"steps": 9}},
        "settings": {"applied": {"policy": "hetero_fcfs"}, "refused": None}, **changes,
    }  # fmt: skip


def test_roles_policies_and_refusals_are_told_by_replica():
    state = RouterState(split=Split(1, 2))
    refused = engine("b", settings={"applied": {}, "refused": "no such policy"})
    page = live_status(FRONT, [FRONT, TimeoutError()], [refused, TimeoutError(), engine("a")], state.serving)
    assert (page["topology"], page["rule"], page["num_fronts_silent"]) == ("dedicated", "round_robin", 1)
    assert page["fronts"] == [{key: value for key, value in FRONT.items() if key != "replicas"}]
    a, b, c = page["engines"]
    assert (a["kinds"], b["kinds"], c["kinds"]) == (["embed"], ["generate"], ["generate"])
    assert (a["answered"], a["policy"], a["refused"], a["totals"]) == (True, "hetero_fcfs", None, {"steps": 9})
    assert b["refused"] == "no such policy"
    assert c == {"replica": "c", "listed": True, "quarantined": None, "kinds": ["generate"], "answered": False}


def test_an_engine_that_answers_and_is_not_listed_yet_serves_nothing():
    state = RouterState()
    page = live_status({**FRONT, "replicas": []}, [], [engine("new")], state.serving)
    assert (page["engines"][0]["kinds"], page["engines"][0]["listed"]) == ([], False)
    assert state.serving("embed", [ReplicaId("x")]) == [ReplicaId("x")]


def test_a_quarantined_replica_serves_nothing_and_its_role_is_another_s():
    state = RouterState(split=Split(1, 2))
    page = live_status({**FRONT, "quarantined": {"a": "its core is stalled"}}, [], [], state.serving)
    assert [engine["kinds"] for engine in page["engines"]] == [[], ["embed"], ["generate"]]
    assert page["engines"][0]["quarantined"] == "its core is stalled"


def test_what_starts_says_which_versions_it_runs(caplog):
    with caplog.at_level(logging.INFO, "ray.serve"):
        log_start("engine_started", "r1")
    (message,) = caplog.messages
    assert message.startswith("engine_started replica=r1 ")
    assert f"orthrus_serve={orthrus_serve.__version__}" in message.split()
    assert f"vllm={installed_versions().get('version', 'none')}" in message.split()
