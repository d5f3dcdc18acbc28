"""Decides how many tokens a prompt or an answer has. Pure: randomness as an argument."""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Fixed:
    """Always `tokens`."""

    tokens: int


@dataclass(frozen=True)
class Uniform:
    """Evenly from `low` to `high`, both included."""

    low: int
    high: int


@dataclass(frozen=True)
class LogNormal:
    """Median `median`, spread `sigma` (of the logarithm), cut to `low`..`high`."""

    median: float
    sigma: float
    low: int
    high: int


Length = Fixed | Uniform | LogNormal


def draw(length: Length, rng: np.random.Generator) -> int:
    """One number of tokens, at least 1."""
    match length:
        case Fixed(tokens):
            return tokens
        case Uniform(low, high):
            return int(rng.integers(low, high + 1))
        case LogNormal(median, sigma, low, high):
            drawn = round(float(rng.lognormal(math.log(median), sigma)))
            return min(max(drawn, low, 1), high)


def describe(length: Length) -> str:
    """For reports: `640`, `64–512`, `about 200 (20–2000)`."""
    match length:
        case Fixed(tokens):
            return str(tokens)
        case Uniform(low, high):
            return f"{low}–{high}"
        case LogNormal(median, _, low, high):
            return f"about {median:g} ({low}–{high})"
