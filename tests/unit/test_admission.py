"""Admission: what is promised under overload, in simulated time, and what is decided at the edges."""

import random
from collections.abc import Sequence

import pytest

from orthrus_serve.policy.admission import (
    MAX_OPEN_WITHOUT_RATE,
    PRIORITIES,
    Admission,
    Asked,
    Backlog,
    Goals,
    Predicted,
    Refused,
    predict,
)
from orthrus_serve.policy.service_rate import Rate
from orthrus_serve.types import Priority, RequestKind
from tests.unit.overload import HEADROOM, Client, Engine, Pool, make_clients

GOALS: dict[RequestKind, Goals] = {"generate": Goals(ttft_s=1.0, e2e_s=3.0), "embed": Goals(e2e_s=1.0)}
TOKENS_PER_S = 1000.0
SECONDS, WARM_S = 120.0, 10.0
MIXED: tuple[Priority, ...] = ("high", "normal", "normal", "low")


def play(
    load: float,
    *,
    admits: bool = True,
    share_returning: float = 0.0,
    priorities: tuple[Priority, ...] = ("normal",),
    num_engines: int = 2,
    speeds: Sequence[float] = (TOKENS_PER_S,),
) -> list[Client]:
    """Clients that arrived once it was warm, at `load` times what the engines can compute."""
    rng = random.Random(1)
    clients = make_clients(rng, SECONDS, load * TOKENS_PER_S * num_engines, GOALS, priorities)
    engines = [Engine(speeds[number % len(speeds)]) for number in range(num_engines)]
    Pool(engines, Admission(HEADROOM) if admits else None, rng).run(clients, share_returning)
    return [client for client in clients if client.arrived_s > WARM_S]


def goodput(clients: list[Client]) -> float:
    """Tokens a second of requests that met their goals; without those that came back after the end."""
    good = (client.num_tokens for client in clients if client.is_good and (client.admitted_s or 0) < SECONDS)
    return sum(good) / (SECONDS - WARM_S)


def share_admitted(clients: list[Client], priority: Priority) -> float:
    mine = [client.admitted_s is not None for client in clients if client.priority == priority]
    return sum(mine) / len(mine)


@pytest.mark.parametrize("share_returning", [0.0, 1.0])
def test_at_twice_the_load_what_is_admitted_keeps_its_goal_at_p99(share_returning: float) -> None:
    admitted = [client for client in play(2.0, share_returning=share_returning) if client.admitted_s is not None]
    assert len(admitted) > 1000
    assert sum(not client.is_good for client in admitted) <= 0.01 * len(admitted)


def test_goodput_under_overload_is_not_below_goodput_at_capacity() -> None:
    at_capacity = goodput(play(1.0))
    assert at_capacity > 0.8 * 2 * TOKENS_PER_S
    for load in (2.0, 4.0):
        assert goodput(play(load)) >= at_capacity
    assert goodput(play(2.0, admits=False)) < 0.1 * at_capacity  # what it is all for


def test_at_half_the_load_nearly_nobody_is_refused() -> None:
    clients = play(0.5)
    assert sum(client.admitted_s is not None for client in clients) >= 0.98 * len(clients)


def test_low_priority_is_refused_first_and_high_last() -> None:
    for load in (1.0, 1.5, 2.0):
        clients = play(load, priorities=MIXED)
        low, normal, high = (share_admitted(clients, priority) for priority in ("low", "normal", "high"))
        assert low < normal < high
    assert high > 0.8
    assert low < 0.2


def test_who_comes_back_when_told_is_mostly_admitted() -> None:
    for load, share in ((1.0, 0.3), (1.0, 1.0), (2.0, 0.3), (2.0, 1.0)):
        clients = play(load, share_returning=share)
        returns = [
            client.admitted_s == came_s
            for client in clients
            for refused, came_s in zip(client.refused, client.tries[1:], strict=False)
            if refused.retry_after_s is not None and refused.retry_after_s < 60
        ]
        assert len(returns) > 20
        assert sum(returns) > 0.65 * len(returns), (load, share)


def test_nobody_is_told_to_come_back_at_once_or_after_more_than_a_minute() -> None:
    for client in play(2.0, share_returning=1.0):
        assert all(refused.reason == "saturated" for refused in client.refused)
        assert all(0 < (refused.retry_after_s or 0) <= 60 for refused in client.refused)


def test_engines_of_different_speed_keep_the_promise_too() -> None:
    admitted = [client for client in play(1.5, speeds=(600.0, 1400.0)) if client.admitted_s is not None]
    assert sum(not client.is_good for client in admitted) <= 0.01 * len(admitted)


def test_engines_that_become_slower_are_noticed_within_a_few_requests() -> None:
    rng = random.Random(2)
    clients = make_clients(rng, 120, 2 * TOKENS_PER_S, GOALS)
    pool = Pool([Engine(TOKENS_PER_S)], Admission(HEADROOM), rng)
    pool.run([client for client in clients if client.arrived_s < 60])
    pool.engines[0].tokens_per_s /= 3
    after = [client for client in clients if client.arrived_s >= 60]
    pool.run(after)
    admitted = [client for client in after if client.admitted_s is not None]
    # What was in the queue, and what came before anybody had noticed.
    assert sum(not client.is_good for client in admitted) <= 30
    late = [client for client in admitted if client.arrived_s > 75]
    assert sum(not client.is_good for client in late) <= 0.01 * len(late)


# --- edges ----------------------------------------------------------------------------------------------------------

RATE = Rate(1000.0, 0.001)


def asked(num_tokens: int = 100, goal_s: float = 1.0, **fields: object) -> Asked:
    return Asked("embed", num_tokens, 0, 0, Goals(e2e_s=goal_s), **fields)  # type: ignore[arg-type]


def test_without_a_goal_everything_is_admitted() -> None:
    request = Asked("embed", 10**9, 0, 0, Goals())
    assert isinstance(Admission(HEADROOM).decide(request, Backlog(10**9, 10**6, None), 0.0), Predicted)
    assert isinstance(Admission(HEADROOM).decide(request, Backlog(10**9, 10**6, RATE), 0.0), Predicted)


def test_before_any_rate_is_known_a_replica_gets_a_few_requests() -> None:
    admission = Admission(HEADROOM)
    assert isinstance(admission.decide(asked(), Backlog(700, MAX_OPEN_WITHOUT_RATE - 1, None), 0.0), Predicted)
    refused = admission.decide(asked(), Backlog(800, MAX_OPEN_WITHOUT_RATE, None), 0.0)
    assert refused == Refused("warming_up", 1.0)


def test_a_goal_that_cannot_be_met_even_alone_is_refused_without_a_time_to_come_back() -> None:
    refused = Admission(HEADROOM).decide(asked(1001), Backlog(0, 0, RATE), 0.0)
    assert refused == Refused("goal_unreachable", None)


def test_an_idle_replica_takes_what_could_meet_its_goal_whatever_was_learnt() -> None:
    admission = Admission(HEADROOM)
    for number in range(200):
        admission.learn("embed", "e2e", 0.1, 100.0, number / 100)
    assert isinstance(admission.decide(asked(), Backlog(0, 0, RATE), 2.0), Predicted)
    assert isinstance(admission.decide(asked(), Backlog(100, 1, RATE), 2.0), Refused)


def test_the_time_to_come_back_is_when_the_backlog_has_shrunk_enough() -> None:
    refused = Admission(HEADROOM).decide(asked(), Backlog(5000, 50, RATE), 0.0)
    # 5.1 s are predicted, and 0.8 s / 1.5 allowed.
    assert refused == Refused("saturated", pytest.approx(5.1 - 0.8 / 1.5))


def test_those_told_before_come_first() -> None:
    admission = Admission(HEADROOM)
    waits = [admission.decide(asked(fingerprint=number), Backlog(5000, 50, RATE), 0.0) for number in range(1, 6)]
    times = [wait.retry_after_s or 0.0 for wait in waits if isinstance(wait, Refused)]
    assert times == sorted(times)
    assert len(set(times)) == 5


def test_a_first_token_waits_for_all_that_is_ahead_and_an_end_for_the_output_besides() -> None:
    request = Asked("generate", 300, 100, 2, Goals())
    predicted = predict(request, 1000, Rate(1000.0, 0.02))
    assert predicted.ttft_s == pytest.approx(1.1)
    assert predicted.e2e_s == pytest.approx(1.1 + 100 * 0.02)


def test_priorities_are_ordered_from_the_highest() -> None:
    assert PRIORITIES == ("high", "normal", "low")
