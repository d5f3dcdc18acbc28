"""What a Front knows of its replicas' load, through the life of requests as Serve reports it."""

import asyncio
from typing import Any

import pytest

from orthrus_serve.policy.replica_choice import Place, home_of
from orthrus_serve.policy.roles import Split
from orthrus_serve.policy.routed_request import RoutedRequest
from orthrus_serve.serving import router_state
from orthrus_serve.serving.engine_reports import ReplicaReport
from orthrus_serve.serving.router_state import NoReplicaError, RouterState, state_of
from orthrus_serve.types import ReplicaId, RequestId

A, B = ReplicaId("a"), ReplicaId("b")


def choose(state: RouterState, request_id: str, replicas: list[ReplicaId], **known: Any) -> ReplicaId:
    return state.choose_and_charge(RoutedRequest(request_id, **known), replicas)


def test_requests_go_to_whoever_has_least_left_and_end_at_zero() -> None:
    state = RouterState()
    first = choose(state, "1", [A, B], charge=100)
    second = choose(state, "2", [A, B], charge=10)
    third = choose(state, "3", [A, B], charge=10)
    assert second == third != first
    for request, replica in (("1", first), ("2", second), ("3", third)):
        state.settle(request, replica)
    assert (state.ledger.num_open, state.ledger.num_own_tokens) == (0, 0)


def test_a_replica_that_just_failed_a_request_is_avoided_by_it_unless_it_is_the_only_one() -> None:
    state = RouterState()
    assert all(choose(state, str(n), [A, B], charge=100, avoid=("a",)) == B for n in range(5))
    assert choose(state, "x", [A], charge=1, avoid=("a",)) == A


@pytest.mark.parametrize(
    ("rule", "chosen"),
    [("least_remaining_tokens", B), ("in_flight_tokens", A), ("power_of_two", A), ("round_robin", A)],
)
def test_each_rule_looks_at_its_own_measure(rule: Any, chosen: ReplicaId) -> None:
    state = RouterState()
    choose(state, "1", [A], charge=50)  # A: one request of 50, all of it left; its turn was first
    choose(state, "2", [B], charge=90)  # B: two of 180, of which 10 are left
    choose(state, "3", [B], charge=90)
    state.ledger.correct(B, {RequestId(f"{n}@b"): 5 for n in "23"})
    state.rule = rule
    assert choose(state, "4", [B, A]) == chosen


def test_a_request_for_one_replica_goes_there_or_nowhere() -> None:
    state = RouterState()
    assert choose(state, "1", [A, B], charge=99, only="b") == B
    assert choose(state, "2", [A, B], charge=99, only="b", avoid=("b",)) == B
    with pytest.raises(NoReplicaError, match="c is not running"):
        choose(state, "3", [A, B], only="c")
    assert state.ledger.num_open == 2


def test_with_roles_each_kind_goes_to_its_own_replicas_and_what_has_no_kind_anywhere() -> None:
    state = RouterState(split=Split(1, 1))
    assert {choose(state, str(n), [B, A], kind="embed") for n in range(9)} == {A}
    assert {choose(state, str(n), [A, B], kind="generate") for n in range(9)} == {B}
    assert {choose(state, f"x{n}", [A, B]) for n in range(30)} == {A, B}
    assert choose(state, "y", [B], kind="embed") == B
    # Where the only replica of a role has just failed the request, another takes the role.
    assert choose(state, "z", [A, B], kind="embed", avoid=("a",)) == B


def test_a_quarantined_replica_is_not_chosen_unless_there_is_no_other_or_it_is_probed() -> None:
    state = RouterState(quarantined={A: "3 requests in a row"})
    assert all(choose(state, str(n), [A, B], charge=100) == B for n in range(5))
    assert choose(state, "probe", [A, B], only="a") == A
    assert choose(state, "again", [A, B], avoid=("b",)) == B, "one that failed this request beats one that fails all"
    state.quarantined = {A: "so", B: "so"}
    assert {choose(state, f"x{n}", [A, B], charge=100) for n in range(20)} == {A, B}


def test_who_was_chosen_for_a_call_can_be_asked_and_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_state, "MAX_CHOSEN", 10)
    state = RouterState()
    for number in range(100):
        choose(state, str(number), [A], call_id=str(number))
    assert {call: placed.replica_id for call, placed in state.chosen.items()} == {str(n): A for n in range(90, 100)}


def test_the_late_end_of_a_first_try_does_not_settle_the_second() -> None:
    state = RouterState()
    choose(state, "1", [A], charge=50)
    choose(state, "1", [B], charge=50)
    state.settle("1", A)
    assert (state.ledger.load(A), state.ledger.load(B)) == (0, 50)


def test_a_dead_replica_is_forgotten_and_a_late_end_finds_nothing() -> None:
    state = RouterState()
    choose(state, "1", [A], charge=50)
    state.forget(A)
    state.settle("1", A)
    state.settle("never charged", B)
    assert (state.ledger.num_open, state.ledger.load(A)) == (0, 0)


async def test_a_replica_that_serve_lists_no_more_for_a_moment_keeps_what_is_charged_to_it() -> None:
    state = RouterState()
    choose(state, "1", [A], charge=50)
    state.ledger.correct(B, {}, num_other_tokens=7)
    state.set_running([])
    assert (state.replicas, state.ledger.load(A), state.ledger.load(B), state.last_turns) == ((), 50, 0, {})
    state.set_running([A, B])
    assert choose(state, "2", [A, B], charge=1) == B
    state.settle("1", A)
    assert state.ledger.load(A) == 0


def test_router_and_metrics_of_one_process_share_one_state() -> None:
    assert state_of("app/Engine") is state_of("app/Engine")
    assert state_of("app/Engine") is not state_of("other/Engine")


async def test_a_report_of_a_replica_corrects_what_is_charged_there() -> None:
    state = RouterState()
    state.set_running([A, B])
    choose(state, "1", [A], charge=100)
    choose(state, "2", [A], charge=100)
    state.take_report("f", ReplicaReport("a", {"f": {"1": 30}, "g": {"9": 500}}, number=1))
    await asyncio.sleep(0)
    assert (state.ledger.load(A), state.ledger.num_own_tokens) == (630, 130)  # 2 is on its way there
    state.settle("1", A)
    state.settle("2", A)
    assert (state.ledger.load(A), state.ledger.num_own_tokens) == (500, 0)


async def test_a_late_report_and_one_of_a_replica_that_is_gone_change_nothing() -> None:
    state = RouterState()
    state.take_report("f", ReplicaReport("a", {"g": {"9": 1}}, number=1))  # no router yet
    state.set_running([A, B])
    state.follow("f", ReplicaReport("a", {"g": {"9": 5}}, number=2))
    state.follow("f", ReplicaReport("a", {"g": {"9": 700}}, number=1))
    assert state.ledger.load(A) == 5
    state.set_running([B])
    state.follow("f", ReplicaReport("a", {"g": {"9": 5}}, number=3))
    assert state.ledger.loads([A, B]) == {A: 0, B: 0}


def test_with_a_place_among_fronts_a_request_goes_home_first_also_within_a_role() -> None:
    replicas = [ReplicaId(f"r{number:02d}") for number in range(16)]
    state = RouterState(place=Place(1, 4))
    assert {choose(state, str(n), replicas, charge=10) for n in range(8)} == set(home_of(replicas, Place(1, 4)))
    state = RouterState(place=Place(1, 2), split=Split(1, 1))
    assert {choose(state, str(n), replicas, kind="embed", charge=10) for n in range(8)} == set(replicas[4:8])
    assert {choose(state, f"g{n}", replicas, kind="generate", charge=10) for n in range(8)} == set(replicas[12:])


def test_who_may_be_chosen_follows_list_roles_quarantine_and_place_at_once() -> None:
    replicas = [ReplicaId(f"r{number:02d}") for number in range(16)]
    state = RouterState(place=Place(0, 4))
    assert choose(state, "1", replicas, charge=1) in replicas[:4]
    state.place = Place(1, 4)
    assert choose(state, "2", replicas, charge=1) in replicas[4:8]
    state.quarantined = dict.fromkeys(replicas[4:12], "so")
    assert choose(state, "3", replicas, charge=1) in [replicas[number] for number in (2, 3, 12, 13)]
    state.quarantined = {}
    state.split = Split(1, 1)
    assert choose(state, "4", replicas, kind="embed", charge=1) in replicas[2:6]
    assert choose(state, "5", replicas[:1], kind="generate", charge=1) == replicas[0]
    for number in range(100):  # what is kept of lists that are gone has a bound
        choose(state, f"x{number}", [A, B], charge=1)
    assert len(state.kept) <= router_state.MAX_KEPT


def test_admission_is_told_of_a_replica_at_home() -> None:
    replicas = tuple(ReplicaId(f"r{number:02d}") for number in range(16))
    state = RouterState(place=Place(2, 4), replicas=replicas)
    likely = state.likely("embed", num_tokens=100)
    assert likely is not None
    assert likely.replica_id in replicas[8:12]
    assert likely.num_candidates == 16


def test_the_halves_of_a_generation_go_to_the_two_roles_however_often_they_are_asked_for() -> None:
    state = RouterState(split=Split(1, 1), replicas=(ReplicaId("a"), ReplicaId("b")))
    replicas = list(state.replicas)
    for _ in range(2):
        chosen = [
            state.choose_and_charge(RoutedRequest("r", "generate", stage=stage), replicas)
            for stage in ("prefill", "decode", None)
        ]
        assert chosen == ["a", "b", "b"]
