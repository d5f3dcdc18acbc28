"""Admission inside the simulator, on the product's own decision: nobody is let in late, and overload costs no goodput."""

from collections.abc import Mapping

import pytest

from orthrus_serve.sim.cluster import Cluster, Played, Setup
from orthrus_serve.sim.engines import SerialEngine, SharedEngine
from orthrus_serve.sim.gate import AdmissionSetup
from orthrus_serve.sim.workload import Coin, poisson
from orthrus_serve.types import RequestKind

TOKENS_PER_S, NUM_ENGINES, SECONDS, WARM_S = 1000.0, 4, 40.0, 10.0
GOALS_S: Mapping[RequestKind, float] = {"generate": 4.0, "embed": 2.0}
MIX = Coin(0.5, prompt=200, output=120, spread=0.5)


def play(load: float, admission: AdmissionSetup | None, engine: type[SerialEngine | SharedEngine]) -> Played:
    """So many times what the engines can compute, over 40 s."""
    trace = poisson(MIX, 5, SECONDS, load * NUM_ENGINES * TOKENS_PER_S)
    setup = Setup(
        lambda agenda, ended, _number: engine(agenda, TOKENS_PER_S, ended), NUM_ENGINES, 2, admission=admission
    )
    return Cluster(setup, 1).play(trace)


def goodput(played: Played) -> float:
    """Requests a second that kept their goal, once warm."""
    good = [a for a in played.answers if WARM_S <= a.at_s < SECONDS and a.latency_s <= GOALS_S[a.kind]]
    return len(good) / (SECONDS - WARM_S)


def share_late(played: Played) -> float:
    """Of those who were let in."""
    let_in = [answer for answer in played.answers if WARM_S <= answer.at_s < SECONDS]
    return sum(answer.latency_s > GOALS_S[answer.kind] for answer in let_in) / len(let_in)


@pytest.mark.parametrize("engine", [SerialEngine, SharedEngine])
@pytest.mark.parametrize("load", [1.3, 2.0])
def test_under_overload_who_is_let_in_is_in_time_and_goodput_holds(
    load: float, engine: type[SerialEngine | SharedEngine]
) -> None:
    answered = play(0.9, None, engine).answers
    at_capacity = len(answered) / SECONDS / 0.9
    gated, open_to_all = play(load, AdmissionSetup(GOALS_S), engine), play(load, None, engine)
    assert share_late(gated) <= 0.02
    assert goodput(gated) > 0.75 * at_capacity
    assert goodput(gated) > 2 * goodput(open_to_all)
    assert len(gated.answers) + len(gated.refused) == len(open_to_all.answers)


def test_at_half_load_hardly_anybody_is_refused() -> None:
    played = play(0.5, AdmissionSetup(GOALS_S), SerialEngine)
    assert len(played.refused) < 0.02 * len(played.answers)


def test_who_could_never_be_in_time_is_refused_and_the_run_ends() -> None:
    played = play(0.5, AdmissionSetup({"generate": 0.01, "embed": 3.0}), SerialEngine)
    late = [kind for kind, at_s in played.refused if at_s > WARM_S]
    assert set(late) == {"generate"}
    assert {answer.kind for answer in played.answers if answer.at_s > WARM_S} == {"embed"}
