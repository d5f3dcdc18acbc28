"""How far predictions of a latency may be from what comes, from recent requests with a similar prediction. Pure.

A prediction counts work ahead over a rate: it orders requests well and is wrong by a factor that depends on engine, policy and
load. So a prediction is multiplied by a high percentile of actual / predicted over the most similar of the recent requests.
Were tomorrow's requests like today's, that many would stay below it whatever the distribution (split conformal prediction);
they are not quite, so what is old is dropped. Guards: bounded memory; without samples a stated prior. Leaves out the
prediction itself (`admission.py`).
"""

import heapq
import math
from bisect import bisect_left, insort
from collections import deque

QUANTILE = 0.99
NUM_SIMILAR = 200
NUM_REMEMBERED = 1000
MEMORY_S = 60.0
# Until there are this many samples, the factor is at least the prior.
MIN_SAMPLES = 20
PRIOR_FACTOR = 1.5
# Nothing is quicker than this: a prediction of nothing would make any factor infinite.
LEAST_PREDICTION_S = 0.001

_Sample = tuple[float, int, float]  # predicted, number (so that equal ones stay apart), actual / predicted


class Calibration:
    """Recent requests of one kind and one measure, ordered by what was predicted."""

    def __init__(self) -> None:
        self._by_prediction: list[_Sample] = []
        self._by_age: deque[tuple[float, _Sample]] = deque()
        self._num_seen = 0

    def observe(self, predicted_s: float, actual_s: float, now_s: float) -> None:
        """A request is over that was predicted to take `predicted_s`."""
        predicted_s = max(predicted_s, LEAST_PREDICTION_S)
        self._num_seen += 1
        sample = (predicted_s, self._num_seen, actual_s / predicted_s)
        insort(self._by_prediction, sample)
        self._by_age.append((now_s, sample))
        if len(self._by_age) > NUM_REMEMBERED:
            self._drop_oldest()

    def factor(self, predicted_s: float, now_s: float) -> float:
        """By what a prediction of `predicted_s` is to be multiplied, so that 99 of 100 requests like it take less."""
        while self._by_age and self._by_age[0][0] < now_s - MEMORY_S:
            self._drop_oldest()
        similar = self._similar(max(predicted_s, LEAST_PREDICTION_S))
        least = PRIOR_FACTOR if len(similar) < MIN_SAMPLES else 0.0
        # As if the new request were one of them: with less than a hundred samples, the largest.
        rank = min(len(similar), math.ceil((len(similar) + 1) * QUANTILE))
        largest = heapq.nlargest(len(similar) - rank + 1, (ratio for _, _, ratio in similar))
        return max(largest[-1] if similar else 0.0, least)

    def _similar(self, predicted_s: float) -> list[_Sample]:
        """The samples with the nearest predictions, by ratio: a run of the ordered list, whose start is found by halving."""
        samples = self._by_prediction
        low, high = 0, max(0, len(samples) - NUM_SIMILAR)
        while low < high:
            middle = (low + high) // 2
            if predicted_s * predicted_s > samples[middle][0] * samples[middle + NUM_SIMILAR][0]:
                low = middle + 1
            else:
                high = middle
        return samples[low : low + NUM_SIMILAR]

    def _drop_oldest(self) -> None:
        _, sample = self._by_age.popleft()
        del self._by_prediction[bisect_left(self._by_prediction, sample)]
