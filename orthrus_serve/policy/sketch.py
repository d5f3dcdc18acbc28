"""Quantiles of positive values in little memory, mergeable: counts in buckets whose bounds grow by a constant factor. Pure.

The bucket bounds are those of DDSketch (Masson, Rim, Lee: VLDB 2019). Guards: a quantile is within `RELATIVE_ERROR` of a value
of that rank, before and after merging, which may happen in any order. Values outside of `SMALLEST` to `LARGEST` count as the
nearer bound.
"""

import math
from collections.abc import Iterable, Mapping

RELATIVE_ERROR = 0.005
SMALLEST, LARGEST = 1e-5, 1e6

_GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG_GAMMA = math.log(_GAMMA)


class QuantileSketch:
    """Counts by bucket; at most about 2,540 buckets, of which one kind of request fills some dozens."""

    def __init__(self, buckets: Mapping[int, int] | None = None) -> None:
        """`buckets` as another sketch had them."""
        self.buckets: dict[int, int] = dict(buckets or {})

    @property
    def count(self) -> int:
        """Values taken in."""
        return sum(self.buckets.values())

    def add(self, value: float) -> None:
        """Take in one value."""
        bucket = math.ceil(math.log(min(max(value, SMALLEST), LARGEST)) / _LOG_GAMMA)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1

    def quantile(self, share: float) -> float | None:
        """The value below which that share of all values lies (0 to 1); None of none."""
        rank = share * (self.count - 1)
        seen = 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen > rank:
                return 2 * _GAMMA**bucket / (_GAMMA + 1)
        return None


def merged(sketches: Iterable[QuantileSketch]) -> QuantileSketch:
    """One sketch of all their values."""
    buckets: dict[int, int] = {}
    for sketch in sketches:
        for bucket, count in sketch.buckets.items():
            buckets[bucket] = buckets.get(bucket, 0) + count
    return QuantileSketch(buckets)
