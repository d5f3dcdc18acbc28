"""How a step's budget is shared: never over it, nothing usable wasted, nobody starved."""

from hypothesis import given
from hypothesis import strategies as st

from orthrus_serve.policy.step_plan import (
    Adapters,
    Admissible,
    Ages,
    Lane,
    LaneLoad,
    next_lane,
    plan_alternating,
    plan_step,
    split_budget,
    usable_waiting_tokens,
)

budgets = st.integers(0, 4096)
counts = st.integers(0, 10_000)
shares = st.floats(0, 0.5)
weights = st.floats(0, 1e300, exclude_min=True)
heads = st.builds(
    Admissible,
    tokens=st.integers(1, 900),
    blocks=st.integers(1, 40),
    adapter=st.integers(0, 3),
    arrival=st.integers(0, 20).map(float),
)
waiting = st.lists(heads, max_size=12)
loads = st.builds(LaneLoad, running_tokens=st.integers(0, 3000), waiting=waiting)


def load(*waiting_tokens: int, running: int = 0) -> LaneLoad:
    return LaneLoad(running, tuple(Admissible(t, 1) for t in waiting_tokens))


@given(budgets, counts, counts, shares, weights)
def test_split_never_exceeds_budget_or_demand_and_wastes_nothing(
    budget: int, generate: int, embed: int, share: float, weight: float
) -> None:
    quota = split_budget(budget, (generate, embed), (share, share), weight)
    assert all(0 <= q <= d for q, d in zip(quota, (generate, embed), strict=True))
    assert sum(quota) == min(budget, generate + embed)


@given(st.integers(2, 4096), counts, counts, shares, weights)
def test_split_gives_every_lane_with_work_its_floor(
    budget: int, generate: int, embed: int, share: float, weight: float
) -> None:
    quota = split_budget(budget, (generate, embed), (share, share), weight)
    for q, d in zip(quota, (generate, embed), strict=True):
        assert q >= min(d, max(1, int(budget * share)))


def test_split_is_proportional_between_the_floors() -> None:
    assert split_budget(100, (300, 700), (0.125, 0.125)) == (30, 70)


def test_a_weight_counts_each_embedding_token_so_many_times() -> None:
    assert split_budget(100, (400, 400), (0.125, 0.125), 3.0) == (25, 75)
    assert split_budget(100, (400, 400), (0.125, 0.125), 1 / 3) == (75, 25)
    assert split_budget(100, (400, 400), (0.125, 0.125), 1e300) == (12, 88)  # the floor holds against any weight


@given(budgets, counts, counts, shares, weights, weights)
def test_a_larger_weight_never_gives_embeddings_less(
    budget: int, generate: int, embed: int, share: float, one: float, other: float
) -> None:
    less, more = (split_budget(budget, (generate, embed), (share, share), w)[1] for w in sorted((one, other)))
    assert less <= more


def test_a_short_prompt_beside_a_long_backlog_needs_one_step_with_the_floor() -> None:
    assert split_budget(512, (37, 100_000), (0.125, 0.125)) == (37, 475)


def test_a_short_prompt_without_a_floor_is_prefilled_by_ever_smaller_bits() -> None:
    left, steps = 37, 0
    while left:
        left -= split_budget(256, (left, 1800), (0.0, 0.0))[0]
        steps += 1
    assert steps > 10


@given(st.integers(0, 2048), loads, loads, st.integers(0, 12), st.integers(0, 200), shares, weights)
def test_plan_stays_within_budget(
    budget: int, generate: LaneLoad, embed: LaneLoad, slots: int, blocks: int, share: float, weight: float
) -> None:
    plan = plan_step(
        budget, (generate, embed), free_slots=slots, free_blocks=blocks, min_share=share, embed_weight=weight
    )
    assert sum(plan.quota) <= budget
    assert min(plan.quota) >= 0


@given(st.integers(1, 2048), loads, loads, st.integers(0, 12), st.integers(0, 200), shares, weights)
def test_plan_never_leaves_running_work_idle_while_budget_is_left(
    budget: int, generate: LaneLoad, embed: LaneLoad, slots: int, blocks: int, share: float, weight: float
) -> None:
    quota = plan_step(
        budget, (generate, embed), free_slots=slots, free_blocks=blocks, min_share=share, embed_weight=weight
    ).quota
    if sum(quota) < budget:
        assert quota[0] >= generate.running_tokens
        assert quota[1] >= embed.running_tokens


def test_a_lane_whose_head_does_not_fit_holds_no_budget() -> None:
    big = LaneLoad(0, (Admissible(500, 50),))
    plan = plan_step(256, (load(100, 300), big), free_slots=8, free_blocks=10, min_share=0.125)
    assert plan.quota == (256, 0)
    assert plan.blocked == {Lane.EMBED}


def test_a_head_younger_than_one_that_does_not_fit_holds_no_budget() -> None:
    """Freed memory is kept for the older one, so the younger one of the other kind does not start."""
    loads = (LaneLoad(0, (Admissible(500, 50, arrival=1.0),)), LaneLoad(300, (Admissible(200, 5, arrival=2.0),)))
    plan = plan_step(256, loads, free_slots=8, free_blocks=10, min_share=0.125)
    assert (plan.quota, plan.before) == ((0, 256), 1.0)
    older = (LaneLoad(0, (Admissible(500, 50, arrival=3.0),)), loads[1])
    assert plan_step(600, older, free_slots=8, free_blocks=10, min_share=0.125).quota == (0, 500)


def test_a_lane_without_a_place_for_its_adapter_holds_no_budget() -> None:
    adapted = LaneLoad(0, (Admissible(500, 1, adapter=7),))
    full = Adapters(frozenset({3}), most=1)
    plan = plan_step(256, (load(running=400), adapted), free_slots=8, free_blocks=99, min_share=0.125, adapters=full)
    assert plan.quota == (256, 0)


def test_one_place_wanted_by_both_lanes_wastes_nothing_of_running_work() -> None:
    generate, embed = LaneLoad(10, (Admissible(90, 1, adapter=1),)), LaneLoad(500, (Admissible(90, 1, adapter=2),))
    one = Adapters(most=1)
    plan = plan_step(100, (generate, embed), free_slots=8, free_blocks=99, min_share=0.125, adapters=one)
    assert sum(plan.quota) == 100


@given(st.frozensets(st.integers(1, 5), max_size=4), st.integers(0, 4), st.integers(0, 5), st.integers(0, 5))
def test_adapters_never_exceed_their_places_and_the_kept_one_is_not_taken(
    used: frozenset[int], most: int, kept_for: int, adapter: int
) -> None:
    before = Adapters(used, max(most, len(used)), kept_for)
    if before.admits(adapter):
        after = before.adding(adapter)
        assert len(after.used) <= after.most
        if kept_for and adapter:
            assert after.admits(kept_for)


def test_usable_tokens_count_what_could_start_together() -> None:
    loads = (
        LaneLoad(0, (Admissible(10, 1, adapter=1, arrival=1.0), Admissible(20, 1, arrival=3.0))),
        LaneLoad(0, (Admissible(40, 1, adapter=2, arrival=2.0), Admissible(80, 99, arrival=4.0))),
    )
    assert usable_waiting_tokens(loads, 8, 50, Adapters(most=1)) == 30  # not the second adapter, not what does not fit
    assert usable_waiting_tokens(loads, 1, 50, Adapters(most=2)) == 10


def test_what_waits_beyond_the_free_slots_holds_no_budget() -> None:
    crowd = load(*[10] * 100)
    plan = plan_step(256, (load(running=400), crowd), free_slots=1, free_blocks=1000, min_share=0.125)
    assert plan.quota == (246, 10)


def test_without_free_slots_everything_goes_to_running_work() -> None:
    plan = plan_step(64, (load(50, 50), load(running=500)), free_slots=0, free_blocks=1000, min_share=0.125)
    assert plan.quota == (0, 64)


def test_one_free_slot_wanted_by_both_lanes_wastes_nothing_of_running_work() -> None:
    plan = plan_step(
        100, (load(20, running=10), load(30, running=500)), free_slots=1, free_blocks=1000, min_share=0.125
    )
    assert sum(plan.quota) == 100


def test_next_lane_prefers_the_lane_that_used_less_of_its_quota() -> None:
    assert next_lane((50, 50), (100, 60), (True, True)) is Lane.EMBED
    assert next_lane((50, 0), (100, 60), (True, True)) is Lane.GENERATE
    assert next_lane((50, 50), (100, 60), (False, False)) is None


def test_alternating_takes_turns_while_both_kinds_have_work() -> None:
    lane, plan = plan_alternating(Lane.EMBED, (True, True), 64)
    assert (lane, plan.quota) == (Lane.GENERATE, (64, 0))
    lane, plan = plan_alternating(lane, (True, True), 64)
    assert (lane, plan.quota) == (Lane.EMBED, (0, 64))


def test_alternating_repeats_the_only_kind_with_work() -> None:
    lane, _ = plan_alternating(Lane.EMBED, (False, True), 64)
    assert lane is Lane.EMBED


def test_of_two_lanes_that_used_the_same_the_older_head_goes_first() -> None:
    assert next_lane((50, 50), (50, 50), (True, True), Ages(older=Lane.EMBED)) is Lane.EMBED
    assert next_lane((50, 50), (50, 50), (True, True), Ages(older=Lane.GENERATE)) is Lane.GENERATE


def test_an_overdue_lane_goes_first_and_gets_half() -> None:
    overdue = Ages(overdue=frozenset({Lane.EMBED}))
    assert next_lane((50, 5), (50, 50), (True, True), overdue) is Lane.EMBED
    flood = load(running=100_000)
    plan = plan_step(200, (flood, load(*[100] * 9)), free_slots=9, free_blocks=999, min_share=0.1, ages=overdue)
    assert plan.quota == (100, 100)
