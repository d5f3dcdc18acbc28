"""The simulator against queues whose answers are known, and against what an H200 measured."""

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from orthrus_serve.serving.router_state import RouterState
from orthrus_serve.sim.batching import BatchingEngine, BatchSpec
from orthrus_serve.sim.cluster import HOP_S, Cluster, Fault, MakeEngine, Played, Setup
from orthrus_serve.sim.engines import Job, SerialEngine, SharedEngine
from orthrus_serve.sim.events import Agenda
from orthrus_serve.sim.step_clock import H200_STEPS, MeasuredStep, StepClock, fit, h200
from orthrus_serve.sim.topologies import card
from orthrus_serve.sim.workload import Arrival, Coin, Hops, MakeOne, heavy_tailed, in_bursts, poisson

TOKENS_PER_S = 1000.0  # so that a token is a millisecond


def fluid(engine: Any, *speeds: float) -> MakeEngine:
    """Engines of that kind; each in turn has one of these speeds."""
    speeds = speeds or (1.0,)
    return lambda agenda, ended, number: engine(agenda, TOKENS_PER_S * speeds[number % len(speeds)], ended)


def arrivals(make_one: MakeOne, seed: int, per_s: float, number: int) -> list[Arrival]:
    """A plain Poisson process: nothing is scaled."""
    rng = random.Random(seed)
    made, at_s = [], 0.0
    for _ in range(number):
        at_s += rng.expovariate(per_s)
        made.append(replace(make_one(rng), at_s=at_s))
    return made


def exponential(mean_tokens: int) -> MakeOne:
    return lambda rng: Arrival(0.0, "embed", 1 + int(rng.expovariate(1 / mean_tokens)), 0)


def fixed(tokens: int) -> MakeOne:
    return lambda _rng: Arrival(0.0, "embed", tokens, 0)


def mean_s(played: Played) -> float:
    """Mean time in the engine: what the way takes is left out."""
    skipped = len(played.answers) // 10
    latencies = [answer.latency_s - 2 * HOP_S for answer in played.answers[skipped:]]
    return sum(latencies) / len(latencies)


def alone(engine: Any) -> Setup:
    """One engine behind one Front: nothing to choose, nothing to report."""
    return Setup(fluid(engine), 1, num_fronts=1, has_reports=False)


# --- queues with known answers --------------------------------------------------------------------------------------


def test_one_engine_with_exponential_sizes_is_an_m_m_1() -> None:
    played = Cluster(alone(SerialEngine), 1).play(arrivals(exponential(100), 1, per_s=7, number=20_000))
    assert mean_s(played) == pytest.approx(0.1 / (1 - 0.7), rel=0.06)


def test_one_engine_with_fixed_sizes_is_an_m_d_1() -> None:
    played = Cluster(alone(SerialEngine), 1).play(arrivals(fixed(100), 2, per_s=8, number=20_000))
    assert mean_s(played) == pytest.approx(0.1 * (1 + 0.8 / (2 * (1 - 0.8))), rel=0.05)


@pytest.mark.parametrize("make_one", [exponential(100), lambda rng: fixed(rng.choice([10, 10, 10, 370]))(rng)])
def test_sharing_one_engine_does_not_depend_on_the_distribution_of_sizes(make_one: MakeOne) -> None:
    played = Cluster(alone(SharedEngine), 1).play(arrivals(make_one, 3, per_s=7, number=20_000))
    assert mean_s(played) == pytest.approx(0.1 / (1 - 0.7), rel=0.06)


def test_least_work_left_on_four_engines_is_one_line_before_four_as_in_erlangs_formula() -> None:
    """M/M/4 at 70 %: who joins the engine with the least work left starts exactly when one line would let him."""
    setup = Setup(fluid(SerialEngine), 4, num_fronts=1, report_gap_s=0.25)
    played = Cluster(setup, 1).play(arrivals(exponential(1000), 4, per_s=2.8, number=8_000))
    load, servers = 2.8, 4
    waiting = load**servers / 24 / (1 - load / servers)
    erlang_c = waiting / (1 + load + load**2 / 2 + load**3 / 6 + waiting)
    assert mean_s(played) == pytest.approx(1.0 + erlang_c / (servers - load), rel=0.05)


def test_power_of_two_on_many_engines_waits_as_long_as_mitzenmachers_formula_says() -> None:
    setup = Setup(fluid(SerialEngine), 200, num_fronts=1, rule="power_of_two", has_reports=False)
    played = Cluster(setup, 1).play(arrivals(exponential(1000), 5, per_s=180, number=20_000))
    supermarket = sum(0.9 ** (2**i - 2) for i in range(1, 9))
    assert mean_s(played) == pytest.approx(supermarket, rel=0.06)


def test_arrivals_see_as_many_open_requests_as_littles_law_says() -> None:
    seen: list[int] = []

    class Watched(RouterState):
        @override
        def choose_and_charge(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(self.ledger.num_open)
            return super().choose_and_charge(*args, **kwargs)

    setup = Setup(fluid(SharedEngine), 4, num_fronts=1, make_state=Watched)
    played = Cluster(setup, 1).play(trace := arrivals(heavy_tailed, 6, per_s=12, number=8_000))
    per_s = len(trace) / trace[-1].at_s
    in_system = per_s * sum(answer.latency_s for answer in played.answers) / len(played.answers)
    assert sum(seen) / len(seen) == pytest.approx(in_system, rel=0.05)


# --- clusters -------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_run() -> None:
    trace = poisson(heavy_tailed, 1, 20.0, 3000.0)
    runs = [Cluster(Setup(fluid(SharedEngine), 4, 3), 7).play(trace) for _ in range(2)]
    assert runs[0] == runs[1]


def test_all_tokens_of_a_trace_are_computed_and_bring_the_load_asked_for() -> None:
    trace = poisson(heavy_tailed, 2, 30.0, 3400.0)
    num_tokens = sum(arrival.num_tokens for arrival in trace)
    assert num_tokens == pytest.approx(30 * 3400, rel=0.05)
    assert trace[-1].at_s == pytest.approx(30.0)
    for engine in (SerialEngine, SharedEngine):
        played = Cluster(Setup(fluid(engine), 4, 3), 7).play(trace)
        assert sum(played.by_engine) == pytest.approx(num_tokens)


def test_a_session_sends_its_next_request_when_the_last_is_answered() -> None:
    (session,) = poisson(Hops(num_hops=2, query=100, prompt=200, output=300, retrieve_s=0.5), 1, 1.0, 1.0)
    played = Cluster(Setup(fluid(SerialEngine), 2), 1).play([session])
    assert [answer.kind for answer in played.answers] == ["embed", "generate"] * 2
    assert played.latency_s == [pytest.approx(2 * (0.1 + 0.5 + 0.5) + 8 * HOP_S)]
    assert played.answers[-1].chain_s == pytest.approx(played.latency_s[0])


def test_a_replica_that_dies_loses_nothing_and_another_takes_its_place() -> None:
    trace = poisson(heavy_tailed, 3, 30.0, 3800.0)
    setup = Setup(fluid(SharedEngine), 4, 2, faults=(Fault(10.0, 1, "die", 5.0),))
    played = Cluster(setup, 1).play(trace)
    assert len(played.answers) == len(trace)
    assert played.num_retried > 0
    assert 0 < played.by_engine[1] < min(played.by_engine[0], *played.by_engine[2:])


def test_reports_send_a_replica_that_has_become_slow_less_work() -> None:
    trace = poisson(heavy_tailed, 4, 60.0, 2000.0)
    setup = Setup(fluid(SerialEngine), 4, 2, faults=(Fault(5.0, 2, "speed", 0.25),))
    played = Cluster(setup, 1).play(trace)
    others = [tokens for number, tokens in enumerate(played.by_engine) if number != 2]
    assert played.by_engine[2] < 0.6 * min(others)


def test_bursts_move_a_kind_to_its_half_of_a_period_and_change_no_request() -> None:
    trace = poisson(Coin(0.5, spread=0.5), 5, 200.0, 4000.0)
    moved = in_bursts(trace, period_s=20.0, peak=1.0)
    assert sorted((a.kind, a.num_tokens) for a in moved) == sorted((a.kind, a.num_tokens) for a in trace)
    assert all((a.at_s % 20.0 < 10.0) == (a.kind == "generate") for a in moved)


# --- engines in steps -----------------------------------------------------------------------------------------------


def flat_clock() -> StepClock:
    """A step of chunks takes a millisecond a token, one of decodes 10 ms."""
    chunks = [MeasuredStep(tokens, decodes, tokens / 1e3) for tokens in (100, 200, 400) for decodes in (0, 50)]
    return fit([*chunks, *(MeasuredStep(n, n, 0.01) for n in (1, 10, 50))])


class Batched:
    """An engine in steps, and when each of its requests ended."""

    def __init__(self, **settings: Any) -> None:
        self.agenda = Agenda()
        self.ended_s: dict[str, float] = {}
        self.engine = BatchingEngine(self.agenda, BatchSpec(flat_clock(), step_tokens=400, **settings), self._end)

    def _end(self, job: Job) -> None:
        self.ended_s[job.request_id] = self.agenda.now_s

    def add(self, name: str, kind: Any, prompt: int, output: int = 0) -> Job:
        job = Job(name, Arrival(0.0, kind, prompt, output))
        self.engine.add(job)
        return job


def test_a_generation_alone_takes_its_prompt_and_a_step_for_every_further_token() -> None:
    batched = Batched()
    job = batched.add("a", "generate", 300, 5)
    batched.agenda.run_until(0.3 + 2.5 * 0.01)
    assert (batched.engine.jobs(), job.num_done) == ([job], 303)  # the prompt's step made the first token
    batched.agenda.run_until(9.0)
    assert batched.ended_s["a"] == pytest.approx(0.3 + 4 * 0.01, rel=0.02)
    assert batched.engine.num_computed == 304  # the last token is made, never computed


def test_a_long_prompt_is_computed_in_steps_of_the_budget() -> None:
    batched = Batched()
    batched.add("a", "embed", 900)
    batched.agenda.run_until(9.0)
    assert batched.engine.num_steps == 3
    assert batched.ended_s["a"] == pytest.approx(0.9, rel=0.02)


@pytest.mark.parametrize(
    ("policy", "num_steps"),
    [("orthrus", 1), ("hetero_fcfs", 1), ("unified_homo", 2)],
)
def test_kinds_share_a_step_except_in_homogeneous_ones(policy: Any, num_steps: int) -> None:
    batched = Batched(policy=policy)
    batched.engine.set_speed(0.0)
    batched.add("g", "generate", 200, 1)
    batched.add("e", "embed", 200)
    batched.engine.set_speed(1.0)
    batched.agenda.run_until(9.0)
    assert batched.engine.num_steps == num_steps
    assert max(batched.ended_s.values()) == pytest.approx(0.4, rel=0.02)


def test_who_arrives_while_a_step_runs_waits_for_the_next_but_one() -> None:
    """As with async scheduling; the next step is planned already."""
    ends: list[float] = []
    for plans_ahead in (True, False):
        batched = Batched(plans_ahead=plans_ahead)
        batched.add("long", "embed", 1200)
        batched.agenda.run_until(0.1)
        batched.add("late", "generate", 40, 1)
        batched.agenda.run_until(9.0)
        ends.append(batched.ended_s["late"])
    assert ends == [pytest.approx(1.2, abs=0.03), pytest.approx(0.8, abs=0.03)]


# --- against a card -------------------------------------------------------------------------------------------------

MEASURED = Path(__file__).parents[2] / "docs/benchmarks/2026-11-30-gpu-steps/speed2.json.gz"


def test_the_h200_clock_goes_by_the_steps_that_were_measured() -> None:
    rows = json.loads(gzip.decompress(MEASURED.read_bytes()))["curve"]
    measured = {
        (r["tokens"], r.get("decodes", r["tokens"] if r["state"] == "decode" else 0)): r["ms"]
        for r in rows
        if r["state"] != "prefill"
    }
    for step in H200_STEPS:
        assert measured[step.tokens, step.decodes] == pytest.approx(1e3 * step.duration_s)
        assert h200().duration_s(step.tokens, step.decodes) == pytest.approx(step.duration_s, rel=0.06)


def test_a_closed_loop_takes_as_long_as_it_took_on_the_card() -> None:
    """p99 by kind and policy, within 15 %; of embeddings beside as many generations the card's is a quarter longer."""
    rows = list(card(quick=False))
    off = {
        (row["embed_share"], row["policy"], row["kind"]): row["simulated_p99_s"] / row["measured_p99_s"] for row in rows
    }
    assert off.pop((0.5, "orthrus", "embed")) == pytest.approx(1.0, abs=0.3)
    assert len(off) == 15
    assert {what: ratio for what, ratio in off.items() if not 0.85 < ratio < 1.15} == {}
    per_s = [row["simulated_per_s"] / row["measured_per_s"] for row in rows if row["measured_per_s"] > 10]
    assert all(0.93 < ratio < 1.07 for ratio in per_s), per_s
