"""Decides how one step's token budget is shared between kinds. Pure.

Knows requests only as token counts. Leaves out which requests are scheduled (vLLM's scheduler, first in first out within a
kind), decodes (reserved before anything here), KV memory beyond a count of blocks, and time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import takewhile

from orthrus_serve.types import RequestKind


class Lane(IntEnum):
    """A kind's place in every pair of counts: index 0 generates, index 1 embeds."""

    GENERATE = 0
    EMBED = 1

    @property
    def other(self) -> "Lane":
        """The other kind's lane."""
        return Lane(1 - self)

    @property
    def kind(self) -> RequestKind:
        """The kind in the words of the API."""
        return "embed" if self is Lane.EMBED else "generate"


LANES = (Lane.GENERATE, Lane.EMBED)


@dataclass(frozen=True)
class Admissible:
    """A waiting request that could start.

    Attributes:
        tokens: prompt tokens it has left.
        blocks: KV blocks that its whole prompt needs.
        adapter: number of its adapter, 0 for none.
        arrival: when it arrived, in any unit.
    """

    tokens: int
    blocks: int
    adapter: int = 0
    arrival: float = 0.0


@dataclass(frozen=True)
class Adapters:
    """The adapters of a step: a forward holds at most `most` different ones.

    Attributes:
        used: adapters of the requests that the step holds already.
        most: how many different ones fit.
        kept_for: adapter of a request that has waited too long for a place; 0 when there is none. The next place is its own,
            and until one is free nobody prolongs the use of the others.
    """

    used: frozenset[int] = frozenset()
    most: int = 0
    kept_for: int = 0

    def admits(self, adapter: int) -> bool:
        """Whether a request with this adapter may start."""
        if adapter == 0:
            return True
        kept = self.kept_for not in (0, adapter) and self.kept_for not in self.used
        taken = len(self.used) + kept
        return taken <= self.most if adapter in self.used else taken < self.most

    def adding(self, adapter: int) -> "Adapters":
        """The same after a request with this adapter has started."""
        return self if adapter == 0 or adapter in self.used else replace(self, used=self.used | {adapter})


@dataclass(frozen=True)
class LaneLoad:
    """Work of one kind before a step: prefill tokens left of running requests, and the head of the waiting line.

    `waiting` is in order of service and may stop early once it holds more requests than there are free slots.
    """

    running_tokens: int = 0
    waiting: Sequence[Admissible] = field(default_factory=tuple)


@dataclass(frozen=True)
class Ages:
    """How long heads have waited: which lanes are overdue, and which lane's head came first (None when one is empty)."""

    overdue: frozenset[Lane] = frozenset()
    older: Lane | None = None


@dataclass(frozen=True)
class StepPlan:
    """What a step may compute besides decodes.

    Attributes:
        quota: most prefill tokens of each lane.
        blocked: lanes whose oldest waiting request does not fit into free KV memory; it is not offered this step.
        before: requests that arrived after this do not start: freed memory is kept for an older one that did not fit.
        ages: the ages that the plan was made for.
    """

    quota: tuple[int, int]
    blocked: frozenset[Lane] = frozenset()
    before: float = math.inf
    ages: Ages = Ages()


def split_budget(
    budget: int, demand: tuple[int, int], min_shares: tuple[float, float], embed_weight: float = 1.0
) -> tuple[int, int]:
    """Shares `budget` tokens between two lanes in proportion to what each has left, with a floor for each.

    A pure proportion, taken anew each step, gives a short prompt beside a long backlog a fixed *fraction* of what it has
    left, so that its last tokens never come; the floor ends that. Neither lane gets more than it can use, nothing that
    could be used is wasted, and with a budget of at least 2 neither lane with work gets nothing.

    Args:
        budget: tokens to share, at least 0.
        demand: tokens that each lane could compute in this step.
        min_shares: floor of each lane as a part of the budget, each 0 to 0.5.
        embed_weight: how many tokens of a generation's prompt one embedding token counts as in the proportion.
    """
    generate, embed = demand
    if generate + embed <= budget:
        return demand
    least = 1 if budget >= 2 else 0
    floor = [min(d, max(int(budget * share), least)) for d, share in zip(demand, min_shares, strict=True)]
    proportion = generate / (generate + embed_weight * embed)
    share = min(max(round(budget * proportion), floor[0]), budget - floor[1])
    share = min(share, generate)
    rest = min(budget - share, embed)
    return (budget - rest, rest)


def next_lane(left: Sequence[int], quota: Sequence[int], can_start: Sequence[bool], ages: Ages = Ages()) -> Lane | None:
    """The lane whose head is offered next, None when neither may start.

    An overdue lane comes first, then the lane that has used the smaller part of its quota, then the lane whose head is older.
    A lane with nothing left is never offered: in vLLM's waiting loop a request that gets 0 tokens ends the loop.
    """
    lanes = [lane for lane in LANES if can_start[lane] and left[lane] > 0]
    if not lanes:
        return None
    return max(lanes, key=lambda lane: (lane in ages.overdue, left[lane] / max(1, quota[lane]), lane == ages.older))


def plan_step(
    budget: int,
    loads: tuple[LaneLoad, LaneLoad],
    *,
    free_slots: int,
    free_blocks: int,
    min_share: float,
    embed_weight: float = 1.0,
    ages: Ages = Ages(),
    adapters: Adapters = Adapters(),
) -> StepPlan:
    """Quotas for a step of policy `orthrus`: proportional to remaining tokens, with a floor, wasting nothing usable.

    Demand counts only what can be admitted: waiting requests up to the free slots, KV blocks and places for adapters. Since
    both lanes draw on the same ones, the admission is played through once, and what a lane turns out unable to use goes to
    the other.

    Args:
        budget: tokens of the step that decodes leave over.
        loads: work of the generate lane and of the embed lane.
        free_slots: requests that may still be admitted to the batch.
        free_blocks: KV blocks that are free.
        min_share: see `split_budget`; a lane that alone is overdue gets half of the budget instead.
        embed_weight: see `split_budget`.
        ages: which lanes have waited too long. Together with the floor this bounds every wait (`docs/scheduling.md`).
        adapters: what the requests that run in this step use.
    """
    budget = max(budget, 0)
    blocked = frozenset(lane for lane in LANES if _does_not_fit(loads[lane], free_slots, free_blocks))
    before = min((loads[lane].waiting[0].arrival for lane in blocked), default=math.inf)
    startable = tuple(() if lane in blocked else _not_after(loads[lane], before, free_slots) for lane in LANES)
    demand = tuple(loads[lane].running_tokens + sum(a.tokens for a in startable[lane]) for lane in LANES)
    shares = [0.5 if ages.overdue == frozenset({lane}) else min_share for lane in LANES]
    quota = split_budget(budget, (demand[0], demand[1]), (shares[0], shares[1]), embed_weight)
    admitted, left = _play_admission(quota, loads, startable, free_slots, free_blocks, ages, adapters)
    usable = [loads[lane].running_tokens + admitted[lane] for lane in LANES]
    result = [min(quota[lane], usable[lane]) for lane in LANES]
    for lane in LANES:
        spare = min(budget - sum(result), max(0, usable[lane] - result[lane]), left[lane.other])
        result[lane] += max(spare, 0)
    return StepPlan(quota=(result[0], result[1]), blocked=blocked, before=before, ages=ages)


def plan_alternating(last: Lane, work: tuple[bool, bool], budget: int) -> tuple[Lane, StepPlan]:
    """Quotas for a step of policy `unified_homo`: the whole budget for one kind, the other kind next time if it has work.

    Args:
        last: the lane of the step before.
        work: whether each lane could compute anything, decodes included.
        budget: the whole token budget.

    Returns:
        The lane of this step, and its plan.
    """
    lane = last.other if work[last.other] else last
    quota = [0, 0]
    quota[lane] = budget
    return lane, StepPlan(quota=(quota[0], quota[1]))


def usable_waiting_tokens(
    loads: tuple[LaneLoad, LaneLoad], free_slots: int, free_blocks: int, adapters: Adapters
) -> int:
    """Tokens of the waiting requests that could start at once, oldest first, were there no budget."""
    tokens = 0
    for request in sorted((*loads[0].waiting, *loads[1].waiting), key=lambda request: request.arrival):
        if free_slots <= 0:
            break
        if request.blocks <= free_blocks and adapters.admits(request.adapter):
            tokens += request.tokens
            free_slots, free_blocks = free_slots - 1, free_blocks - request.blocks
            adapters = adapters.adding(request.adapter)
    return tokens


def _not_after(load: LaneLoad, before: float, free_slots: int) -> tuple[Admissible, ...]:
    return tuple(takewhile(lambda request: request.arrival <= before, load.waiting[:free_slots]))


def _does_not_fit(load: LaneLoad, free_slots: int, free_blocks: int) -> bool:
    return bool(load.waiting) and free_slots > 0 and load.waiting[0].blocks > free_blocks


def _play_admission(
    quota: tuple[int, int],
    loads: tuple[LaneLoad, LaneLoad],
    startable: tuple[tuple[Admissible, ...], ...],
    free_slots: int,
    free_blocks: int,
    ages: Ages,
    adapters: Adapters,
) -> tuple[list[int], list[int]]:
    """Tokens of the waiting requests that each lane admits under these quotas, and the quota each leaves unused."""
    left = [quota[lane] - min(quota[lane], loads[lane].running_tokens) for lane in LANES]
    admitted, position = [0, 0], [0, 0]
    while free_slots > 0:
        can_start = [
            position[lane] < len(startable[lane]) and startable[lane][position[lane]].blocks <= free_blocks
            for lane in LANES
        ]
        lane = next_lane(left, quota, can_start, ages)
        if lane is None:
            break
        request = startable[lane][position[lane]]
        position[lane] += 1
        if not adapters.admits(request.adapter):
            continue  # as vLLM's waiting loop: skipped, and the next one in its line is looked at
        adapters = adapters.adding(request.adapter)
        admitted[lane] += request.tokens
        left[lane] -= min(left[lane], request.tokens)
        free_blocks -= request.blocks
        free_slots -= 1
    return admitted, left
