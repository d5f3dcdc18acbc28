"""The bound on waiting, on a simulated engine that runs the real plan: slots, a budget, decodes that hold their slot.

Bound (proved in docs/scheduling.md): a request is prefilled after at most ceil(W / floor) + k · (max_wait + H) steps, with W
the prefill tokens of its kind up to and including its own, k the requests of its kind up to and including it, floor the
least tokens a kind gets per step, and H the longest that any request holds a slot.
"""

from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orthrus_serve.policy.step_plan import LANES, Admissible, Ages, Lane, LaneLoad, next_lane, plan_step

BUDGET, SLOTS, MIN_SHARE, MAX_WAIT = 32, 4, 0.125, 10
MAX_PROMPT, MAX_OUTPUT = 40, 12
FLOOR = int((BUDGET - SLOTS) * MIN_SHARE)
# A slot is held while its prompt is prefilled (its kind gets at least the floor) and then decoded.
LONGEST_HOLD = SLOTS * MAX_PROMPT // FLOOR + MAX_OUTPUT


@dataclass
class Job:
    """A request of the simulation. `left` prompt tokens, `output` decode steps, `bound` the step by which it is prefilled."""

    lane: Lane
    left: int
    output: int
    arrived: int = 0
    bound: int = 0
    prefilled_at: int | None = None


class Simulation:
    """One engine: FIFO lines per kind, decodes first, quotas from the plan, first-come within a kind."""

    def __init__(self, *, slots: int = SLOTS, with_ages: bool = True) -> None:
        self.now = 0
        self.slots = slots
        self.with_ages = with_ages
        self.running: list[Job] = []
        self.lines: tuple[deque[Job], deque[Job]] = (deque(), deque())

    def add(self, job: Job) -> None:
        line = self.lines[job.lane]
        ahead = [*(j for j in self.running if j.lane == job.lane and j.left), *line, job]
        tokens = sum(j.left for j in ahead)
        job.arrived = self.now
        job.bound = self.now + -(-tokens // FLOOR) + len(ahead) * (MAX_WAIT + LONGEST_HOLD)
        line.append(job)

    def step(self) -> None:
        decodes = [job for job in self.running if not job.left]
        loads = tuple(
            LaneLoad(
                sum(j.left for j in self.running if j.lane == lane), [Admissible(j.left, 1) for j in self.lines[lane]]
            )
            for lane in LANES
        )
        ages = self._ages()
        budget = BUDGET - len(decodes)
        free = self.slots - len(self.running)
        plan = plan_step(
            budget, (loads[0], loads[1]), free_slots=free, free_blocks=10**6, min_share=MIN_SHARE, ages=ages
        )
        left = list(plan.quota)
        for job in self.running:
            self._compute(job, left)
        while free and (lane := next_lane(left, plan.quota, [bool(line) for line in self.lines], ages)) is not None:
            job = self.lines[lane].popleft()
            self.running.append(job)
            free -= 1
            self._compute(job, left)
        self.now += 1
        for job in self.running:
            if job.left == 0 and job.prefilled_at is None:
                job.prefilled_at = self.now
        for job in decodes:
            job.output -= 1
        self.running = [j for j in self.running if j.left or (j.lane is Lane.GENERATE and j.output > 0)]

    def _ages(self) -> Ages:
        if not self.with_ages:
            return Ages()
        overdue = frozenset(
            lane for lane in LANES if self.lines[lane] and self.now - self.lines[lane][0].arrived > MAX_WAIT
        )
        heads = [lane for lane in LANES if self.lines[lane]]
        return Ages(overdue, min(heads, key=lambda lane: self.lines[lane][0].arrived) if heads else None)

    @staticmethod
    def _compute(job: Job, left: list[int]) -> None:
        count = min(job.left, left[job.lane])
        job.left -= count
        left[job.lane] -= count


jobs = st.builds(Job, lane=st.sampled_from(LANES), left=st.integers(1, MAX_PROMPT), output=st.integers(0, MAX_OUTPUT))
arrivals = st.lists(st.tuples(st.integers(0, 3), jobs), min_size=1, max_size=60)


@settings(max_examples=300)
@given(arrivals)
def test_every_request_is_prefilled_within_the_bound(arrivals: list[tuple[int, Job]]) -> None:
    simulation, all_jobs = Simulation(), []
    for gap, job in arrivals:
        for _ in range(gap):
            simulation.step()
        simulation.add(job)
        all_jobs.append(job)
    for _ in range(5000):
        if all(job.prefilled_at is not None for job in all_jobs):
            break
        simulation.step()
    assert all(job.prefilled_at is not None and job.prefilled_at <= job.bound for job in all_jobs)


@pytest.mark.parametrize("with_ages", [True, False])
def test_one_slot_and_an_endless_stream_of_generations_starve_an_embedding_only_without_ages(with_ages: bool) -> None:
    simulation = Simulation(slots=1, with_ages=with_ages)
    simulation.add(Job(Lane.GENERATE, 5, 3))
    embedding = Job(Lane.EMBED, 5, 0)
    simulation.add(embedding)
    for _ in range(200):
        simulation.add(Job(Lane.GENERATE, 5, 3))
        simulation.step()
    assert (embedding.prefilled_at is not None) is with_ages


@given(st.integers(1, 40), st.sampled_from(LANES))
def test_a_flood_of_the_other_kind_delays_a_lone_prompt_by_the_floor_only(tokens: int, lane: Lane) -> None:
    """With a slot free, a lone prompt is prefilled in ceil(tokens / floor) steps, however much the other kind has."""
    flood = LaneLoad(running_tokens=10**6)
    left, steps = tokens, 0
    while left:
        lone = LaneLoad(running_tokens=left)
        loads = (flood, lone) if lane is Lane.EMBED else (lone, flood)
        left -= plan_step(BUDGET, loads, free_slots=1, free_blocks=99, min_share=MIN_SHARE).quota[lane]
        steps += 1
    assert steps <= -(-tokens // int(BUDGET * MIN_SHARE))
