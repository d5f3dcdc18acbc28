"""The step-time model on a simulated clock: steps of a known law, with noise."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orthrus_serve.policy.step_time import StepTimeModel, step_budget

FIXED_S, PER_TOKEN_S, PER_DECODE_S = 0.004, 20e-6, 60e-6


def law(tokens: int, decodes: int) -> float:
    """The simulated card: 4 ms, 20 µs a token, 60 µs more a decode."""
    return FIXED_S + PER_TOKEN_S * tokens + PER_DECODE_S * decodes


def fitted(rng: random.Random, *, noise: float = 0.05, steps: int = 300) -> StepTimeModel:
    model = StepTimeModel()
    for _ in range(steps):
        decodes = rng.randrange(0, 64)
        tokens = decodes + rng.randrange(1, 2048)
        model.observe(tokens, decodes, law(tokens, decodes) * (1 + rng.uniform(-noise, noise)))
    return model


@pytest.mark.parametrize(("tokens", "decodes"), [(64, 64), (512, 0), (1024, 32), (2048, 64)])
def test_predictions_follow_the_law(tokens: int, decodes: int) -> None:
    model = fitted(random.Random(1))
    assert model.predict(tokens, decodes) == pytest.approx(law(tokens, decodes), rel=0.1, abs=0.001)


@pytest.mark.parametrize("target_s", [0.01, 0.02, 0.03])
def test_steps_with_decodes_end_within_the_target(target_s: float) -> None:
    rng, model, clock_s, late = random.Random(2), StepTimeModel(), 0.0, 0
    for step in range(600):
        decodes = rng.randrange(8, 64)
        budget = step_budget(model, target_s, decodes, least_prefill=16, max_tokens=4096)
        duration_s = law(budget, decodes) * (1 + rng.uniform(-0.03, 0.03))
        model.observe(budget, decodes, duration_s)
        clock_s += duration_s
        late += step >= 60 and duration_s > 1.15 * target_s
    assert late <= 6


def test_the_target_is_used_and_not_undercut() -> None:
    model = fitted(random.Random(3))
    budget = step_budget(model, 0.02, 32, least_prefill=16, max_tokens=4096)
    assert law(budget, 32) == pytest.approx(0.02, rel=0.15)


def test_the_model_follows_a_card_that_slows_down() -> None:
    rng, model = random.Random(4), fitted(random.Random(4))
    for _ in range(400):
        tokens = rng.randrange(100, 2048)
        model.observe(tokens, 10, 2 * law(tokens, 10))
    assert model.predict(1000, 10) == pytest.approx(2 * law(1000, 10), rel=0.1)


def test_one_stall_does_not_spoil_the_model() -> None:
    model = fitted(random.Random(5))
    before = model.predict(1000, 16)
    model.observe(1000, 16, 60.0)
    assert model.predict(1000, 16) == before


def test_without_decodes_the_whole_budget_is_used() -> None:
    assert step_budget(fitted(random.Random(6)), 0.001, 0, least_prefill=16, max_tokens=4096) == 4096


def test_without_a_target_the_whole_budget_is_used() -> None:
    assert step_budget(fitted(random.Random(6)), None, 30, least_prefill=16, max_tokens=4096) == 4096


def test_an_unfitted_model_holds_nothing_back() -> None:
    assert step_budget(StepTimeModel(), 0.001, 30, least_prefill=16, max_tokens=512) == 512


@given(st.integers(1, 256), st.integers(1, 128), st.integers(256, 8192), st.floats(1e-4, 1.0), st.integers(0, 2**32))
def test_prefill_always_keeps_its_least_tokens(decodes: int, least: int, most: int, target_s: float, seed: int) -> None:
    budget = step_budget(fitted(random.Random(seed), steps=20), target_s, decodes, least_prefill=least, max_tokens=most)
    assert min(most, decodes + least) <= budget <= most


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 300), st.floats(0, 5, allow_nan=False)), max_size=60))
def test_predictions_stay_finite_and_positive_whatever_was_observed(seen: list[tuple[int, int, float]]) -> None:
    model = StepTimeModel()
    for tokens, decodes, duration_s in seen:
        model.observe(tokens, decodes, duration_s)
    assert 0.0 <= model.predict(1000, 10) < float("inf")
