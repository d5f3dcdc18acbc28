"""Shares of a card: nobody starves, two busy engines fit into one budget, and an uncut input runs within the stated steps."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orthrus_serve.policy.card_share import CardLoad, credited, most_steps, share_of, share_tokens

TOKENS = st.integers(0, 10**7)
BUSY = st.integers(1, 10**7)
FLOORS = st.floats(0.0, 0.5)


@given(BUSY, FLOORS)
def test_an_engine_alone_has_the_whole_budget(own, min_share):
    assert share_of("remaining", CardLoad(own, 0), min_share) == 1.0


@given(BUSY, BUSY, FLOORS)
def test_two_busy_engines_share_in_proportion_and_fit_into_one_budget(left, right, min_share):
    ours = share_of("remaining", CardLoad(left, right), min_share)
    theirs = share_of("remaining", CardLoad(right, left), min_share)
    assert min_share <= ours <= 1 - min_share
    assert ours + theirs == pytest.approx(1.0)
    if min_share < left / (left + right) < 1 - min_share:
        assert ours == pytest.approx(left / (left + right))


@given(TOKENS, TOKENS, FLOORS)
def test_without_the_page_a_share_does_not_depend_on_the_other(own, other, min_share):
    load = CardLoad(own, other)
    assert (share_of("static", load, min_share), share_of("whole", load, min_share)) == (0.5, 1.0)


@given(st.floats(0.0, 1.0), st.integers(2, 8192), st.integers(0, 512))
def test_a_step_is_within_the_largest_and_holds_every_decode(share, largest, decodes):
    tokens = share_tokens(share, largest, decodes)
    assert min(largest, decodes + 1) <= tokens <= largest
    assert tokens <= max(share * largest, decodes + 1)


def steps_until_empty(lengths: list[int], shares: list[float], largest: int, min_share: float) -> int:
    """A line of uncut inputs, served as vLLM's scheduler serves it: in order, until the next does not fit."""
    line, left, step = deque(lengths), 0, 0
    while line:
        share = max(min_share, shares[step % len(shares)])
        budget = credited(left, share_tokens(share, largest), largest)
        assert budget <= largest
        spent = 0
        while line and line[0] <= budget - spent:
            spent += line.popleft()
        left, step = budget - spent, step + 1
    return step


@given(
    st.integers(2, 2048).flatmap(
        lambda largest: st.tuples(st.just(largest), st.lists(st.integers(1, largest), min_size=1, max_size=12))
    ),
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8),
    FLOORS,
)
def test_a_line_of_uncut_inputs_runs_within_the_bound(line, shares, min_share):
    largest, lengths = line
    assert steps_until_empty(lengths, shares, largest, min_share) <= most_steps(lengths, largest, min_share)


def test_the_longest_input_takes_as_many_steps_as_floors_fit_into_the_largest():
    assert most_steps([512], 512, 0.125) == 8
    assert steps_until_empty([512], [0.0], 512, 0.125) == 8
    assert steps_until_empty([512], [1.0], 512, 0.125) == 1


@given(st.lists(st.floats(0.01, 0.5), min_size=200, max_size=200), st.integers(64, 2048))
def test_credit_neither_gives_nor_takes_tokens_beside_the_rounding_of_one_input(shares, largest):
    """Over many steps with inputs always waiting, an engine computes its shares, up to one input."""
    left, spent, granted, length = 0, 0, 0, max(1, largest // 2)
    for share in shares:
        tokens = share_tokens(share, largest)
        granted += tokens
        budget = credited(left, tokens, largest)
        used = budget // length * length
        spent, left = spent + used, budget - used
    assert granted - largest <= spent <= granted
