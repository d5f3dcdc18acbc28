"""An engine in steps: the product's own step plan decides what each one holds, measured steps say how long it takes.

What vLLM's scheduler does around the plan is done here in its simplest form: running requests first, decodes before chunks,
then waiting ones as the quotas let them, first in first out within a kind. As with async scheduling, a step is planned while
the one before it runs: who arrives meanwhile waits for the next but one. Leaves out KV memory (there is always enough),
preemption, adapters and the prefix cache.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field

from orthrus_serve.policy.service_rate import Done
from orthrus_serve.policy.step_plan import (
    LANES,
    Admissible,
    Ages,
    Lane,
    LaneLoad,
    next_lane,
    plan_alternating,
    plan_step,
)
from orthrus_serve.policy.step_time import StepTimeModel, step_budget
from orthrus_serve.sim.engines import Ended, Job
from orthrus_serve.sim.events import Agenda
from orthrus_serve.sim.step_clock import StepClock
from orthrus_serve.types import PolicyName

LEAST_PREFILL_TOKENS = 16  # as `engine/scheduler.py`
ENOUGH_BLOCKS = 2**40


@dataclass(frozen=True)
class BatchSpec:
    """An engine's settings; names and defaults as in a Serve file."""

    clock: StepClock
    policy: PolicyName = "orthrus"
    step_tokens: int = 2048
    max_num_seqs: int = 256
    min_share: float = 0.125
    embed_weight: float = 1.0
    max_wait_steps: int = 64
    target_tpot_s: float | None = None
    plans_ahead: bool = True


@dataclass(eq=False)
class _Waiting:
    """A request that no step has held yet."""

    job: Job
    number: int
    since_step: int

    @property
    def tokens(self) -> int:
        return self.job.arrival.num_prompt


@dataclass(eq=False)
class _Prompt:
    """A request whose prompt is not complete."""

    job: Job
    left: int


@dataclass
class _Step:
    """What a step computes: chunks by request, and whether decodes take part."""

    chunks: list[tuple[_Prompt, int]] = field(default_factory=list)
    has_decodes: bool = True


class BatchingEngine:
    """See the module."""

    def __init__(self, agenda: Agenda, spec: BatchSpec, ended: Ended) -> None:
        self._agenda = agenda
        self._spec = spec
        self._ended = ended
        self._speed = 1.0
        self._is_running = False
        self._num_computed = 0
        self._num_over, self._busy_s = 0, 0.0  # steps that ended, and their time
        self._arrived: list[Job] = []  # since the step after the one that runs was planned
        self._seen: list[Job] = []  # planned for in that step
        self._lines: tuple[deque[_Waiting], deque[_Waiting]] = (deque(), deque())
        self._prompts: list[_Prompt] = []
        self._num_decoded = 0  # steps that held decodes
        self._decoding: list[tuple[int, int, Job]] = []  # heap: the count of such steps at which it ends
        self._num_entered = 0
        self._num_steps = 0
        self._last_lane = Lane.EMBED
        self._step_time = StepTimeModel(scale=spec.step_tokens)

    @property
    def num_computed(self) -> float:
        return self._num_computed

    @property
    def num_steps(self) -> int:
        """Forward passes so far."""
        return self._num_steps

    def done(self) -> Done:
        """See `VirtualEngine`."""
        return Done({"generate": self._num_computed}, self._num_over, self._busy_s)

    def add(self, job: Job) -> None:
        self._arrived.append(job)
        if not self._is_running:
            self._begin_step()

    def jobs(self) -> list[Job]:
        for ends_at, _, job in self._decoding:
            job.num_done = job.arrival.num_tokens - (ends_at - self._num_decoded)
        for prompt in self._prompts:
            prompt.job.num_done = prompt.job.arrival.num_prompt - prompt.left
        waiting = [entry.job for line in self._lines for entry in line]
        return [
            *(job for _, _, job in self._decoding),
            *(prompt.job for prompt in self._prompts),
            *waiting,
            *self._seen,
            *self._arrived,
        ]

    def set_speed(self, factor: float) -> None:
        """From the next step on; the one that runs ends when it was to."""
        self._speed = factor
        if not self._is_running:
            self._begin_step()

    def _begin_step(self) -> None:
        self._is_running = False
        if self._speed <= 0:
            return
        self._line_up()
        step = self._plan()
        decodes = len(self._decoding) if step.has_decodes else 0
        tokens = decodes + sum(count for _, count in step.chunks)
        if tokens == 0:
            return
        self._num_steps += 1
        self._is_running = True
        duration_s = self._spec.clock.duration_s(tokens, decodes) / self._speed
        if self._spec.target_tpot_s is not None:
            self._step_time.observe(tokens, decodes, duration_s)
        self._agenda.after(duration_s, self._end_step, step, tokens, duration_s)

    def _end_step(self, step: _Step, tokens: int, duration_s: float) -> None:
        self._num_computed += tokens
        self._num_over += 1
        self._busy_s += duration_s
        over: list[Job] = []
        if step.has_decodes:
            self._num_decoded += 1
            while self._decoding and self._decoding[0][0] <= self._num_decoded:
                over.append(heapq.heappop(self._decoding)[2])
        for prompt, count in step.chunks:
            prompt.left -= count
            if prompt.left == 0:
                self._prompts.remove(prompt)
                if prompt.job.arrival.num_output > 1:
                    # The step that completes a prompt makes the first output token.
                    ends_at = self._num_decoded + prompt.job.arrival.num_output - 1
                    self._num_entered += 1
                    heapq.heappush(self._decoding, (ends_at, self._num_entered, prompt.job))
                else:
                    over.append(prompt.job)
        self._begin_step()
        for job in over:
            self._ended(job)
        # The next but one is planned now, while the next one runs; those who answer this step at once are in it.
        self._seen, self._arrived = self._arrived, []
        if not self._is_running and self._seen:
            self._begin_step()

    def _line_up(self) -> None:
        """Who was planned for joins the waiting lines; with nobody to run meanwhile, everybody."""
        is_idle = not (self._decoding or self._prompts or self._seen or any(self._lines))
        if is_idle or not self._spec.plans_ahead:
            self._seen, self._arrived = self._arrived, []
        for job in self._seen:
            self._num_entered += 1
            self._lines[job.lane].append(_Waiting(job, self._num_entered, self._num_steps))
        self._seen = []

    def _plan(self) -> _Step:
        decodes = len(self._decoding)
        budget = step_budget(
            self._step_time,
            self._spec.target_tpot_s,
            decodes,
            least_prefill=LEAST_PREFILL_TOKENS,
            max_tokens=self._spec.step_tokens,
        )
        if self._spec.policy == "hetero_fcfs":
            return self._fill_in_order(budget - decodes)
        free_slots = self._spec.max_num_seqs - decodes - len(self._prompts)
        running = [0, 0]
        for prompt in self._prompts:
            running[prompt.job.lane] += prompt.left
        if self._spec.policy == "unified_homo":
            work = [bool(running[lane] or (free_slots > 0 and self._lines[lane])) for lane in LANES]
            work[Lane.GENERATE] = work[Lane.GENERATE] or decodes > 0
            self._last_lane, plan = plan_alternating(self._last_lane, (work[0], work[1]), budget)
            has_decodes = self._last_lane is Lane.GENERATE
            return self._fill(list(plan.quota), budget - decodes * has_decodes, free_slots, Ages(), has_decodes)
        ages = self._ages()
        loads = (
            LaneLoad(running[0], self._admissible(Lane.GENERATE, free_slots)),
            LaneLoad(running[1], self._admissible(Lane.EMBED, free_slots)),
        )
        plan = plan_step(
            budget - decodes,
            loads,
            free_slots=free_slots,
            free_blocks=ENOUGH_BLOCKS,
            min_share=self._spec.min_share,
            embed_weight=self._spec.embed_weight,
            ages=ages,
        )
        return self._fill(list(plan.quota), budget - decodes, free_slots, ages, True)

    def _fill(self, quota: list[int], left: int, free_slots: int, ages: Ages, has_decodes: bool) -> _Step:
        """Running prompts first, then waiting ones, each lane within its quota and both within what is left."""
        step = _Step(has_decodes=has_decodes)
        whole = tuple(quota)
        for prompt in self._prompts:
            count = min(prompt.left, quota[prompt.job.lane], left)
            if count > 0:
                step.chunks.append((prompt, count))
                quota[prompt.job.lane] -= count
                left -= count
        while free_slots > 0 and left > 0:
            lane = next_lane(quota, whole, [bool(self._lines[lane]) for lane in LANES], ages)
            if lane is None:
                break
            count = self._start(step, self._lines[lane].popleft(), min(quota[lane], left))
            quota[lane] -= count
            left -= count
            free_slots -= 1
        return step

    def _fill_in_order(self, left: int) -> _Step:
        """Arrival order, whatever the kind."""
        free_slots = self._spec.max_num_seqs - len(self._decoding) - len(self._prompts)
        step = _Step()
        for prompt in self._prompts:
            count = min(prompt.left, left)
            if count > 0:
                step.chunks.append((prompt, count))
                left -= count
        while free_slots > 0 and left > 0:
            heads = [line[0] for line in self._lines if line]
            if not heads:
                break
            first = min(heads, key=lambda entry: entry.number)
            left -= self._start(step, self._lines[first.job.lane].popleft(), left)
            free_slots -= 1
        return step

    def _start(self, step: _Step, entry: _Waiting, most: int) -> int:
        prompt = _Prompt(entry.job, entry.tokens)
        self._prompts.append(prompt)
        count = min(prompt.left, most)
        step.chunks.append((prompt, count))
        return count

    def _ages(self) -> Ages:
        heads = [lane for lane in LANES if self._lines[lane]]
        overdue = [
            lane for lane in heads if self._num_steps - self._lines[lane][0].since_step > self._spec.max_wait_steps
        ]
        older = min(heads, key=lambda lane: self._lines[lane][0].number) if heads else None
        return Ages(frozenset(overdue), older)

    def _admissible(self, lane: Lane, free_slots: int) -> tuple[Admissible, ...]:
        heads: list[Admissible] = []
        tokens = 0
        for entry in self._lines[lane]:
            if len(heads) >= free_slots or tokens >= self._spec.step_tokens:
                break
            heads.append(Admissible(entry.tokens, 1, arrival=entry.number))
            tokens += entry.tokens
        return tuple(heads)
