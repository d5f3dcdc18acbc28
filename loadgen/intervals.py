"""Confidence intervals (95 %) that survive dependent samples. Pure: randomness as an argument.

Requests of one run share queues, so neighbours are alike and the textbook interval would be too narrow. Rates use batch means,
quantiles a bootstrap of whole blocks of neighbours, ratios of two targets the spread between their interleaved rounds.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

NUM_BATCHES = 20
NUM_RESAMPLES = 200
MAX_SAMPLES = 20_000  # more are thinned evenly before the bootstrap; the value itself uses all

# Student's t, 97.5 %, for 1 to 30 degrees of freedom.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


class Estimate(msgspec.Struct, frozen=True):
    """A value with its 95 % confidence interval; None where there were too few samples to tell."""

    value: float
    low: float | None = None
    high: float | None = None


def t_quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's t."""
    return _T[degrees - 1] if degrees <= len(_T) else 1.96 + 2.4 / degrees


def mean_of(values: Sequence[float]) -> Estimate:
    """Mean of independent values (rounds, batches)."""
    array = np.asarray(values, dtype=np.float64)
    value = float(array.mean())
    if len(array) < 2:
        return Estimate(value)
    half = t_quantile(len(array) - 1) * float(array.std(ddof=1)) / math.sqrt(len(array))
    return Estimate(value, value - half, value + half)


def rate(times_s: Sequence[float], begin_s: float, end_s: float, weights: Sequence[float] | None = None) -> Estimate:
    """Events (or weight) per second in [begin, end), its interval from the means of equal batches of the window."""
    duration_s = end_s - begin_s
    if duration_s <= 0:
        return Estimate(0.0)
    times = np.asarray(times_s, dtype=np.float64)
    counts, _ = np.histogram(
        times[times < end_s], bins=NUM_BATCHES, range=(begin_s, end_s), weights=_kept(weights, times < end_s)
    )
    total = float(counts.sum())
    if len(times) < NUM_BATCHES:
        return Estimate(total / duration_s)
    estimate = mean_of([float(count) * NUM_BATCHES / duration_s for count in counts])
    return Estimate(total / duration_s, max(estimate.low or 0.0, 0.0), estimate.high)


def quantiles(values: Sequence[float], shares: Sequence[float], rng: np.random.Generator) -> list[Estimate]:
    """Quantiles of values in the order of their times; intervals by a moving-block bootstrap.

    A quantile of n values has no interval where fewer than five values lie beyond it: the data then cannot bound it.
    """
    array = np.asarray(values, dtype=np.float64)
    points = [float(point) for point in np.quantile(array, shares)]
    if len(array) < NUM_BATCHES:
        return [Estimate(point) for point in points]
    resampled = np.quantile(_blocks(array, rng), shares, axis=1)
    lows, highs = np.quantile(resampled, [0.025, 0.975], axis=1)
    estimates: list[Estimate] = []
    for share, point, low, high in zip(shares, points, lows.tolist(), highs.tolist(), strict=True):
        enough = len(array) * min(1 - share, share) >= 5
        estimates.append(Estimate(point, min(low, point), max(high, point)) if enough else Estimate(point))
    return estimates


def mean_by_blocks(values: Sequence[float], rng: np.random.Generator) -> Estimate:
    """Mean of values in the order of their times, by the same bootstrap."""
    array = np.asarray(values, dtype=np.float64)
    value = float(array.mean())
    if len(array) < NUM_BATCHES:
        return Estimate(value)
    means: NDArray[np.float64] = np.mean(_blocks(array, rng), axis=1)
    return Estimate(value, float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975)))


def ratio_of_pairs(values: Sequence[float], baselines: Sequence[float]) -> Estimate | None:
    """Geometric mean of value ÷ baseline over rounds, with the interval of the logarithms; None if none is positive."""
    logs = [math.log(v / b) for v, b in zip(values, baselines, strict=True) if v > 0 and b > 0]
    if not logs:
        return None
    estimate = mean_of(logs)
    low, high = estimate.low, estimate.high
    return Estimate(
        math.exp(estimate.value), None if low is None else math.exp(low), None if high is None else math.exp(high)
    )


def _blocks(array: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Resamples × values, each row made of randomly placed blocks of √n neighbours."""
    if len(array) > MAX_SAMPLES:
        array = array[np.linspace(0, len(array) - 1, MAX_SAMPLES).astype(np.int64)]
    size = max(round(math.sqrt(len(array))), 1)
    begins = rng.integers(0, len(array) - size + 1, size=(NUM_RESAMPLES, math.ceil(len(array) / size)))
    places = (begins[:, :, np.newaxis] + np.arange(size)).reshape(NUM_RESAMPLES, -1)[:, : len(array)]
    return array[places]


def _kept(weights: Sequence[float] | None, mask: NDArray[np.bool_]) -> NDArray[np.float64] | None:
    return None if weights is None else np.asarray(weights, dtype=np.float64)[mask]
