"""Predicts how long a step takes and how large it may be to meet a time target. Pure: durations come in, no clock.

Duration ≈ fixed + per_token · tokens + per_decode · decodes, fitted online. A step is compute-bound in its tokens; a decode
adds the reading of its KV cache. Leaves out what the step holds (`step_plan.py`) and how durations are measured (the engine).
"""

from dataclasses import dataclass, field

FORGETTING = 0.98
# Steps of one size do not tell a fixed part from a part per token. The prior then decides, and blames the tokens: that makes
# steps smaller, and steps of two sizes tell them apart.
PRIOR_VARIANCE = (1.0, 1e4, 1e2)
# Forgetting without news lets the covariance grow without bound; above this trace nothing is forgotten.
MAX_TRACE = 2e4
MIN_OBSERVATIONS = 8
OUTLIER_RATIO = 8.0

Vector = tuple[float, float, float]


@dataclass
class StepTimeModel:
    """Recursive least squares with forgetting over (1, tokens / scale, decodes / scale).

    Attributes:
        scale: tokens that count as 1 in the fit, so that its numbers are of one size; the largest budget will do.
    """

    scale: float = 1024.0
    num_observations: int = 0
    _weights: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    _covariance: list[list[float]] = field(
        default_factory=lambda: [[PRIOR_VARIANCE[i] if i == j else 0.0 for j in range(3)] for i in range(3)]
    )
    _usual_s: float = 0.0

    @property
    def is_fitted(self) -> bool:
        """Whether enough steps were seen to trust a prediction."""
        return self.num_observations >= MIN_OBSERVATIONS

    def observe(self, tokens: int, decodes: int, duration_s: float) -> None:
        """Learns from one step that computed `tokens` (decodes among them) in `duration_s`.

        A step that took many times its prediction (a stall of the machine, a compilation) is counted but not learnt.
        """
        if tokens <= 0 or duration_s <= 0:
            return
        self.num_observations += 1
        longest_s = OUTLIER_RATIO * max(self.predict(tokens, decodes), self._usual_s)
        is_outlier = self.is_fitted and duration_s > longest_s
        # The usual duration follows outliers too, if slowly: a card that really became slow is believed after some steps.
        seen_s = min(duration_s, longest_s) if self.is_fitted else duration_s
        self._usual_s += (seen_s - self._usual_s) / min(self.num_observations, 32)
        if is_outlier:
            return
        x = self._features(tokens, decodes)
        projected = [sum(self._covariance[i][j] * x[j] for j in range(3)) for i in range(3)]
        kept = FORGETTING if sum(self._covariance[i][i] for i in range(3)) < MAX_TRACE else 1.0
        gain_scale = kept + sum(x[i] * projected[i] for i in range(3))
        error = duration_s - sum(self._weights[i] * x[i] for i in range(3))
        for i in range(3):
            self._weights[i] += projected[i] / gain_scale * error
        for i in range(3):
            for j in range(3):
                self._covariance[i][j] = (self._covariance[i][j] - projected[i] * projected[j] / gain_scale) / kept

    def predict(self, tokens: int, decodes: int) -> float:
        """Seconds that a step of `tokens`, `decodes` of them single decode tokens, is expected to take; at least 0."""
        x = self._features(tokens, decodes)
        return max(0.0, sum(self._weights[i] * x[i] for i in range(3)))

    def max_tokens(self, target_s: float, decodes: int, *, least: int, most: int) -> int:
        """The largest step, from `least` to `most` tokens, that is expected to end within `target_s`.

        Before the model is fitted, and where tokens seem to cost nothing, there is no reason to hold back: `most`.
        """
        per_token = self._weights[1] / self.scale
        if not self.is_fitted or per_token <= 0:
            return most
        spare_s = target_s - self.predict(0, decodes)
        return int(max(least, min(most, spare_s / per_token)))

    def _features(self, tokens: int, decodes: int) -> Vector:
        return (1.0, tokens / self.scale, decodes / self.scale)


def step_budget(
    model: StepTimeModel, target_s: float | None, decodes: int, *, least_prefill: int, max_tokens: int
) -> int:
    """The token budget of a step.

    Without decodes in flight nobody waits for the step's end, so it may be full. With decodes it follows the time target, but
    leaves at least `least_prefill` tokens beside them: prompts and embeddings always progress, or their wait has no bound.

    Args:
        model: predicts durations.
        target_s: time target for a step with decodes; None for none.
        decodes: decode tokens that the step will hold.
        least_prefill: tokens kept for prompts and embeddings, whatever the target.
        max_tokens: largest budget allowed.
    """
    if target_s is None or decodes == 0:
        return max_tokens
    least = min(max_tokens, decodes + least_prefill)
    return model.max_tokens(target_s, decodes, least=least, most=max_tokens)
