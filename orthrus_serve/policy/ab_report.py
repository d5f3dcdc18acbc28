"""Compares two arms by what they did in the same slices of time, and says when the data cannot tell. Pure.

Intervals come from batch means. Requests share queues and are not independent, so slices are joined into 5 to 20 batches, which
nearly are, and both arms are taken over the same ones, so that a load that changes hits both alike. The point is the
quantile of all values, the spread that of the batches round it (sectioning), which keeps the bias of small batches out.
All intervals of one report together hold at 95 % (Bonferroni): many rows of equal arms must not show a difference that is none.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import get_args

from orthrus_serve.policy.sketch import RELATIVE_ERROR, SMALLEST, QuantileSketch
from orthrus_serve.policy.slices import Cell, Key, Told, merge_slices
from orthrus_serve.types import RequestKind

CONFIDENCE = 0.95
MIN_BATCHES, MAX_BATCHES = 5, 20
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
# A batch bounds a quantile when so many of its values lie beyond.
MIN_BEYOND = 2
# A difference that would take longer to show than this is called none.
LONGEST_WAIT_S = 6 * 3600.0

# A ratio of two quantiles of sketches may be off by as much, however many values they hold.
SKETCH_BIAS = 2 * RELATIVE_ERROR

Batches = Sequence[Mapping[Key, Cell]]


@dataclass(frozen=True)
class Size:
    """What an arm runs on. `num_gpus` 0: on CPU."""

    num_replicas: int
    num_gpus: float

    @property
    def divisor(self) -> float:
        """GPUs, or replicas where there is no GPU; at least 1, so that an arm that is down divides by something."""
        return self.num_gpus or self.num_replicas or 1.0


@dataclass(frozen=True)
class Ratio:
    """Arm over baseline. `low` and `high` None: too few requests for an interval. `more_s`: for about how much longer to
    measure until it can be told; None when it can be, or when that would take hours."""

    value: float
    low: float | None
    high: float | None
    more_s: float | None = None

    @property
    def is_told(self) -> bool:
        """Whether the data can tell one from the other: the interval does not hold 1."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


@dataclass(frozen=True)
class Row:
    """One measure of two arms. `of` and `of_baseline` are in its unit; a ratio is there when both have values."""

    measure: str
    kind: RequestKind
    of: float | None
    of_baseline: float | None
    ratio: Ratio | None


@dataclass(frozen=True)
class _Quantile:
    """A quantile of a sketch, as a measure."""

    name: str
    sketch: Callable[[Cell], QuantileSketch]
    share: float

    @property
    def num_needed(self) -> int:
        """Values that each batch of each arm must hold."""
        return math.ceil(MIN_BEYOND / (1 - self.share))


_RATES: tuple[tuple[str, Callable[[Cell], int]], ...] = (
    ("requests/s", lambda cell: cell.ok),
    ("tokens/s", lambda cell: cell.tokens),
)
_SKETCHES: tuple[tuple[str, Callable[[Cell], QuantileSketch]], ...] = (
    ("TTFT", lambda cell: cell.ttft),
    ("end to end", lambda cell: cell.e2e),
)
_QUANTILES = tuple(
    _Quantile(f"{title} {name}", sketch, share) for title, sketch in _SKETCHES for name, share in QUANTILES.items()
)


def compare(told: Told, arm: str, baseline: str, sizes: Mapping[str, Size]) -> list[Row]:
    """Every measure of `arm` against `baseline`; measures that neither has are left out. Rates are per GPU, or per replica
    where there is no GPU."""
    total = merge_slices(told.slices)
    kinds = [kind for kind in get_args(RequestKind) if any(_cell(total, who, kind).ok for who in (arm, baseline))]
    quantiles = [
        (kind, measure)
        for kind in kinds
        for measure in _QUANTILES
        if any(measure.sketch(_cell(total, who, kind)).count for who in (arm, baseline))
    ]
    num_rows = len(quantiles) + len(kinds) * len(_RATES)
    pair = _Pair(told, total, arm, baseline, sizes, alpha=(1 - CONFIDENCE) / max(1, num_rows))
    rows: list[Row] = []
    for kind in kinds:
        rows += [pair.rate_row(kind, name, count) for name, count in _RATES]
        rows += [pair.quantile_row(kind, measure) for of, measure in quantiles if of == kind]
    return rows


def rate(told: Told, key: Key, count: Callable[[Cell], int]) -> tuple[float, float | None]:
    """Something per second of one arm and kind, and half of its 95 % interval, None where there are too few slices."""
    if not told.slices:
        return 0.0, None
    batches = _batches(told, min(MAX_BATCHES, len(told.slices)))
    batch_s = told.slice_s * (len(told.slices) // len(batches))
    rates = [count(batch.get(key, Cell())) / batch_s for batch in batches]
    mean = sum(rates) / len(rates)
    if len(rates) < MIN_BATCHES:
        return mean, None
    spread = math.sqrt(sum((one - mean) ** 2 for one in rates) / (len(rates) - 1))
    return mean, t_quantile(1 - (1 - CONFIDENCE) / 2, len(rates) - 1) * spread / math.sqrt(len(rates))


def t_quantile(share: float, degrees: int) -> float:
    """A quantile of Student's t, by its expansion round the normal one (within 1 % from 4 degrees of freedom on)."""
    z, n = NormalDist().inv_cdf(share), degrees
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / n**power for power, term in enumerate(terms, start=1))


def _cell(cells: Mapping[Key, Cell], arm: str, kind: RequestKind) -> Cell:
    return cells.get((arm, kind)) or Cell()


def _batches(told: Told, num_batches: int) -> Batches:
    """So many batches of equally many slices; the oldest that fill none are left out."""
    size = len(told.slices) // num_batches
    first = len(told.slices) - size * num_batches
    return [merge_slices(told.slices[at : at + size]) for at in range(first, len(told.slices), size)]


@dataclass(frozen=True)
class _Pair:
    """Two arms in the same time; `alpha` is the chance that one interval may miss."""

    told: Told
    total: Mapping[Key, Cell]
    arm: str
    baseline: str
    sizes: Mapping[str, Size]
    alpha: float

    def quantile_row(self, kind: RequestKind, measure: _Quantile) -> Row:
        mine, others = (measure.sketch(_cell(self.total, who, kind)) for who in (self.arm, self.baseline))
        value, base_value = mine.quantile(measure.share), others.quantile(measure.share)
        if value is None or base_value is None:
            return Row(measure.name, kind, value, base_value, None)
        point = math.log(value / base_value)
        moves = self._moves(kind, measure, point)
        if moves is not None:
            return Row(measure.name, kind, value, base_value, self._interval(point, moves, SKETCH_BIAS))
        so_far_s = len(self.told.slices) * self.told.slice_s
        # A third more than the mean needs, so that the emptiest batch has enough.
        needed_s = so_far_s * MIN_BATCHES * measure.num_needed * 4 / 3 / min(mine.count, others.count)
        ratio = Ratio(value / base_value, None, None, self._wait_s(needed_s - so_far_s))
        return Row(measure.name, kind, value, base_value, ratio)

    def _moves(self, kind: RequestKind, measure: _Quantile, point: float) -> list[float] | None:
        """How much the log of the ratio differs from `point` in as many batches as hold enough; None: of no five."""
        for num_batches in range(min(MAX_BATCHES, len(self.told.slices)), MIN_BATCHES - 1, -1):
            pairs = [
                [measure.sketch(_cell(batch, who, kind)) for who in (self.arm, self.baseline)]
                for batch in _batches(self.told, num_batches)
            ]
            if all(sketch.count >= measure.num_needed for pair in pairs for sketch in pair):
                values = [[sketch.quantile(measure.share) or SMALLEST for sketch in pair] for pair in pairs]
                return [math.log(mine / other) - point for mine, other in values]
        return None

    def rate_row(self, kind: RequestKind, name: str, count: Callable[[Cell], int]) -> Row:
        num_slices = len(self.told.slices)
        batches = _batches(self.told, min(MAX_BATCHES, num_slices))
        mine, others = ([count(_cell(batch, who, kind)) for batch in batches] for who in (self.arm, self.baseline))
        batch_s = self.told.slice_s * (num_slices // len(batches))
        divisors = [self.sizes[who].divisor for who in (self.arm, self.baseline)]
        value = sum(mine) / (batch_s * len(batches)) / divisors[0]
        base_value = sum(others) / (batch_s * len(batches)) / divisors[1]
        if not value or not base_value:
            return Row(name, kind, value, base_value, None)
        if len(batches) < MIN_BATCHES:
            more_s = self._wait_s((MIN_BATCHES - num_slices) * self.told.slice_s)
            return Row(name, kind, value, base_value, Ratio(value / base_value, None, None, more_s))
        # The ratio of two sums, to first order: so much each batch moves the log of it.
        raw, mean = sum(mine) / sum(others), sum(mine) / len(mine)
        moves = [(one - raw * other) / mean for one, other in zip(mine, others, strict=True)]
        return Row(name, kind, value, base_value, self._interval(math.log(value / base_value), moves))

    def _interval(self, point: float, moves: Sequence[float], bias: float = 0.0) -> Ratio:
        """The ratio e^`point`, with the interval that batches moving the log of it by `moves` give, wider by `bias`."""
        degrees = len(moves) - 1
        spread = math.sqrt(sum(move * move for move in moves) / degrees)
        half = t_quantile(1 - self.alpha / 2, degrees) * spread / math.sqrt(len(moves))
        low, high = math.exp(point - half - bias), math.exp(point + half + bias)
        if not low <= 1 <= high or abs(point) <= bias:
            return Ratio(math.exp(point), low, high)
        so_far_s = len(self.told.slices) * self.told.slice_s  # an interval narrows with the root of the time
        return Ratio(math.exp(point), low, high, self._wait_s(so_far_s * ((half / (abs(point) - bias)) ** 2 - 1)))

    def _wait_s(self, wait_s: float) -> float | None:
        return max(self.told.slice_s, wait_s) if wait_s < LONGEST_WAIT_S else None
